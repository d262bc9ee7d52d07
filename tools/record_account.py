"""Where the seconds of whole workloads go, on a GPU, beside their bounds; for chapter 17.

    .venv/bin/python tools/record_account.py book/results/h200-account.json

Each workload runs twice without a profiler, the first time to warm up, and once with it: every
kernel of that run is counted under one kind. Copies run beside kernels, so the kinds together can
be a little more than the time in which something ran. Random weights, bfloat16; seconds.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from mie.bench.bound import Bound, limits_of, work_of
from mie.bench.model_shapes import random_decoder, shape
from mie.bench.offline import config_for
from mie.bench.recorded_run import stamp
from mie.bench.standard_workloads import standard_workload
from mie.bench.step_profile import ON_THE_GPU, profile_steps, union
from mie.engine.assemble import assemble
from mie.model.decoder import Decoder

RUNS = (("qwen3-0.6b", "nano"), ("qwen2.5-7b", "nano"), ("qwen2.5-7b", "chat"))
HOW = (
    "whole workloads, random weights: wall_s without a profiler, the second of two runs; the rest "
    "from a third one under it: kernels by kind, idle_s when none ran; bounds as in mie bench "
    "throughput; seconds"
)
# The first kind of which one word is in the name of a kernel; products are cuBLAS and our own.
KINDS = {
    "decode_attention": ("paged_decode", "_plan_kernel"),
    "prefill_attention": ("paged_prefill",),
    "products": ("nvjet", "gemm", "splitk", "skinny", "cutlass"),
    "sampling": ("_chunk_kernel", "_choose_kernel"),
    "between_products": ("rms_norm", "rope", "swiglu", "kv_write"),
    "copies": ("memcpy", "memset"),
}


def main() -> None:
    if len(sys.argv) != 2 or not torch.cuda.is_available():
        sys.exit(__doc__ + "\nIt needs a CUDA device.")
    values: dict[str, float] = {}
    content: dict[str, Any] = {}
    for model in dict.fromkeys(model for model, _ in RUNS):
        decoder = random_decoder(shape(model), torch.bfloat16, "cuda")
        content = {**stamp(decoder), "how": HOW, "values": values}
        for workload in [workload for name, workload in RUNS if name == model]:
            for name, seconds in account(decoder, workload).items():
                values[f"{model}_{workload}_{name}_s"] = seconds
                print(f"{model} {workload} {name:18} {seconds:7.3f} s", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "other")


def account(decoder: Decoder, name: str) -> dict[str, float]:
    """Seconds by kind, and those of the bound."""
    workload = standard_workload(name)
    config = config_for(decoder, workload, {})
    core = assemble(decoder, config).core
    wall = 0.0
    for run in range(2):
        began = time.perf_counter()
        for request in workload.requests(f"run{run}"):
            core.add(request)
        while core.has_work:
            core.step()
        wall = time.perf_counter() - began
    for request in workload.requests("profile"):
        core.add(request)
    trace, *_ = profile_steps(core.step, lambda: core.has_work, sys.maxsize, decoder.device)
    events = [e for e in json.loads(trace)["traceEvents"] if e.get("cat") in ON_THE_GPU]
    spans = [(1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"])) for event in events]
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    kinds: Counter[str] = Counter()
    for event in events:
        kinds[kind_of(event["name"])] += 1e-6 * event["dur"]
    limits = limits_of(decoder.device, decoder.dtype)
    assert limits is not None, "a GPU has limits"
    bound = Bound(
        work_of(decoder.config, decoder.dtype, workload.lengths, config.max_num_seqs), limits
    )
    return {
        "wall": wall,
        "span": span,
        **kinds,
        "idle": span - union(spans),
        "bound_kv": bound.kv_seconds,
        "bound_weights": bound.weight_seconds,
        "bound_prefill": bound.prefill_seconds,
    }


if __name__ == "__main__":
    main()
