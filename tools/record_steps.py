"""What recording and overlapping steps are worth, on a GPU, for the chapters that quote it.

    .venv/bin/python tools/record_steps.py book/results/h200-throughput.json

Qwen3-0.6B's shape, random weights, bfloat16. A rate is the best of RUNS after a warm-up, as in
`mie bench throughput --workload`; a step is the average of the profiled ones. Steps of another
machine belong in another file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mie.bench.model_shapes import random_decoder, shape
from mie.bench.offline import measure_workload
from mie.bench.recorded_run import stamp
from mie.bench.step_profile import GpuSteps, profile_steps, read_profile
from mie.config import EngineConfig
from mie.engine.assemble import assemble
from mie.model.decoder import Decoder
from mie.request import Request
from mie.sampling_params import SamplingParams

MODEL = "qwen3-0.6b"
RUNS = 2
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"cuda_graphs": False, "overlap": False},
    "graphs": {"cuda_graphs": True, "overlap": False},
    "graphs_overlap": {"cuda_graphs": True, "overlap": True},
}
SEQUENCES, CONTEXT, STEPS = 32, 512, 20
HOW = (
    f"{MODEL}'s shape with random weights; rates: output tokens a second, best of {RUNS} runs "
    f"after a warm-up; graphs_on, graphs_off: a step of {SEQUENCES} sequences at about {CONTEXT} "
    f"tokens, mean of {STEPS} profiled steps, both overlapped; overlap_on, overlap_off: the nano "
    "workload at half of its output, recorded steps; values are seconds, launches, tokens a second"
)


def main() -> None:
    if len(sys.argv) != 2 or not torch.cuda.is_available():
        sys.exit(__doc__ + "\nIt needs a CUDA device.")
    decoder = random_decoder(shape(MODEL), torch.bfloat16, "cuda")
    values: dict[str, float] = {}
    for workload in ("single", "nano"):
        for way, settings in WAYS.items():
            result = measure_workload(decoder, workload, model=MODEL, runs=RUNS, **settings)
            values[f"{workload}_{way}_tokens_per_s"] = result.best.tokens_per_second
            gpu = result.split.gpu
            print(workload, way, f"{result.best.tokens_per_second:,.0f}", flush=True)
            if workload == "nano" and gpu is not None and way != "eager":
                name = "overlap_on" if settings["overlap"] else "overlap_off"
                values |= seconds_of(name, gpu)
    values["graphs_sequences"] = SEQUENCES
    for name, graphs in (("graphs_off", False), ("graphs_on", True)):
        steps = decode_steps(decoder, graphs)
        values |= {f"{name}_launches": steps.launches} | seconds_of(name, steps)
    content: dict[str, Any] = {**stamp(decoder), "how": HOW, "values": values}
    Path(sys.argv[1]).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def seconds_of(name: str, steps: GpuSteps) -> dict[str, float]:
    return {
        f"{name}_wall_s": steps.wall_seconds,
        f"{name}_busy_s": steps.busy_seconds,
        f"{name}_cpu_s": steps.cpu_seconds,
    }


def decode_steps(decoder: Decoder, graphs: bool) -> GpuSteps:
    """Steps in which SEQUENCES sequences decode, around CONTEXT tokens each."""
    config = EngineConfig(
        max_num_seqs=SEQUENCES,
        token_budget=SEQUENCES * CONTEXT,
        max_model_len=2 * CONTEXT,
        num_blocks=SEQUENCES * CONTEXT // 8,
        cuda_graphs=graphs,
        trace_steps=0,
    )
    engine = assemble(decoder, config)
    params = SamplingParams(max_tokens=4 * STEPS, temperature=0.6, seed=0, ignore_eos=True)
    for number in range(SEQUENCES):
        prompt = tuple((number + 7 * at) % 10_000 for at in range(CONTEXT - 2 * STEPS))
        engine.core.add(Request(f"r{number}", prompt, params))
    for _ in range(STEPS + STEPS // 2):
        engine.core.step()
    core = engine.core
    return read_profile(*profile_steps(core.step, lambda: core.has_work, STEPS, decoder.device))


if __name__ == "__main__":
    main()
