"""``mie bench``: the benchmarks as commands.

Invariant: as in ``mie.cli``: standard output carries the tables or the numbers, standard error the
progress, and a command imports what it needs when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from mie.errors import MieError
from mie.terminal.console import Device, Dtype, Model, stderr

if TYPE_CHECKING:
    from mie.bench.decode import DecodeSpeed
    from mie.model.decoder import Decoder

bench = typer.Typer(
    help="Measure the engine. [bold]memory[/] counts; [bold]pool[/], [bold]throughput[/] and "
    "[bold]kernels[/] take times.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
STANDARD_OUTPUT = Path("-")
STANDARD = "With --workload"
WORKLOAD_ONLY = {"model_config", "random_weights", "runs", "token_budget", "profile_file"}
WORKLOAD_ONLY |= {"cuda_graphs", "overlap"}
MIXED_ONLY = {"alone", "decode", "trace_file", "seed"}
Seed = Annotated[int, typer.Option(min=0, help="Another workload of the same kinds.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        dir_okay=False,
        allow_dash=True,
        help="Write all numbers to FILE; '-' for standard output, instead of the tables.",
    ),
]


@bench.command("memory", epilog="Example: [bold]mie bench memory --report paging.html[/]")
def bench_memory(
    json_file: JsonFile = None,
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            dir_okay=False,
            help="Write plots and tables to FILE, one HTML page.",
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """What paging, sharing and scheduling save for 256 requests, the same counts on every machine.

    No model is loaded and no clock is read; about 25 seconds on a quiet core.
    """
    from mie.bench.memory import memory_report
    from mie.bench.memory_plots import require_matplotlib
    from mie.bench.memory_report import memory_page
    from mie.bench.memory_tables import memory_tables
    from mie.terminal.bench import show_tables

    _require_folders(json_file, report_file)
    if report_file:
        require_matplotlib()
    with stderr().status("counting") as status:
        report = memory_report(seed, tell=status.update)
    numbers = json.dumps(report.as_dict(), indent=2)
    if json_file == STANDARD_OUTPUT:
        print(numbers)
    else:
        show_tables(memory_tables(report).values(), Console())
        if json_file:
            _write(json_file, numbers + "\n")
    if report_file:
        _write(report_file, memory_page(report))


@bench.command("pool", epilog="Example: [bold]mie bench pool --operations 100000[/]")
def bench_pool(
    operations: Annotated[int, typer.Option(min=1, help="How many of each kind.")] = 1_000_000,
    seed: Seed = 0,
) -> None:
    """What an operation costs in pools of 1,000, 10,000 and 100,000 blocks.

    Times are of all operations, steps of the first 10,000 at most; about a minute by default.
    """
    from mie.bench.pool import POOL_SIZES, pool_costs
    from mie.terminal.bench import show_pool_costs

    costs = []
    with stderr().status("") as status:
        for size in POOL_SIZES:
            status.update(f"{operations:,} operations of each kind, {size:,} blocks")
            costs += pool_costs(size, operations, seed)
    show_pool_costs(costs, Console())


THROUGHPUT_EXAMPLES = """
Examples:

[bold]mie bench throughput --requests 16[/]

[bold]mie bench throughput --workload nano --model-config qwen3-0.6b --random-weights[/]

[bold]mie bench throughput --workload single --model smollm2-135m --profile steps.json[/]
"""


@bench.command("kernels", epilog="Example: [bold]mie bench kernels --json kernels.json[/]")
def bench_kernels(json_file: JsonFile = None) -> None:
    """What each kernel of the fast step takes on this GPU; about a minute."""
    from mie.terminal.bench_kernels import measured, show_kernels

    _require_folders(json_file)
    times, numbers = measured()
    if json_file == STANDARD_OUTPUT:
        print(numbers)
    else:
        show_kernels(times, Console())
        if json_file:
            _write(json_file, numbers + "\n")


@bench.command("throughput", epilog=THROUGHPUT_EXAMPLES)
def bench_throughput(
    ctx: typer.Context,
    model: Model = "smollm2-135m",
    requests: Annotated[
        int,
        typer.Option(
            min=1, help="How many, of mixed length; with --workload, its first so many, else all."
        ),
    ] = 32,
    max_num_seqs: Annotated[
        int,
        typer.Option(
            min=1, help="How many run at once; with --workload: nano 256, chat 1,024, single 1."
        ),
    ] = 8,
    alone: Annotated[
        int,
        typer.Option(min=1, help="How many run one at a time: the slowest way, and a rate."),
    ] = 8,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="Also decode 1, 8 and 32 sequences, beside a plain loop."),
    ] = False,
    json_file: JsonFile = None,
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            dir_okay=False,
            help="Write the steps of the continuous run to FILE, for https://ui.perfetto.dev.",
        ),
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="nano, chat or single: measure the engine alone, on a workload that others are "
            "measured on. auto is bfloat16 on a GPU then.",
            rich_help_panel=STANDARD,
        ),
    ] = None,
    model_config: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help="qwen3-0.6b, qwen2.5-7b, or a config.json, instead of --model.",
            rich_help_panel=STANDARD,
        ),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="What --model-config needs: nothing is downloaded, and time is the same.",
            rich_help_panel=STANDARD,
        ),
    ] = False,
    runs: Annotated[
        int,
        typer.Option(min=1, help="The best counts, after a warm-up.", rich_help_panel=STANDARD),
    ] = 3,
    token_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that a step computes at most; by default 16,384 on a GPU, 512 on a CPU.",
            rich_help_panel=STANDARD,
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool,
        typer.Option(help="Replay recorded decode steps, on a GPU.", rich_help_panel=STANDARD),
    ] = True,
    overlap: Annotated[
        bool,
        typer.Option(
            help="Launch a step before the tokens of the last one are known, on a GPU.",
            rich_help_panel=STANDARD,
        ),
    ] = True,
    profile_file: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            dir_okay=False,
            help="Write 20 steps to FILE, for https://ui.perfetto.dev: on a GPU every kernel, on a "
            "CPU what the engine planned.",
            rich_help_panel=STANDARD,
        ),
    ] = None,
) -> None:
    """Tokens a second on this machine: one at a time, in static waves, continuously.

    Requests of mixed length wait from the start; prompts are random, answers have fixed lengths.

    One to two minutes for the built-in model on two quiet cores.

    With --workload instead: output tokens a second of the engine as it is, the share of what the
    machine's memory and matrix units allow, and where a step goes.
    """
    given = _given(ctx)
    if workload is not None:
        _refuse(given & MIXED_ONLY, "does not go with --workload")
        _require_folders(json_file, profile_file)
        _bench_workload(
            workload,
            requests if "requests" in given else None,
            _Weights(model if "model" in given else None, model_config, random_weights),
            {"dtype": dtype, "device": device},
            runs,
            profile_file,
            json_file,
            max_num_seqs=max_num_seqs if "max_num_seqs" in given else None,
            token_budget=token_budget,
            cuda_graphs=cuda_graphs,
            overlap=overlap,
        )
        return
    _refuse(given & WORKLOAD_ONLY, "needs --workload")
    from mie.bench.throughput import mixed_workload, throughput
    from mie.scheduling.trace import to_perfetto
    from mie.terminal.bench import show_decode_speeds, show_throughput, stamp

    _require_folders(json_file, trace_file)
    decoder = load_decoder(model, dtype, device)
    with stderr().status("") as status:
        mixed = mixed_workload(decoder.config.vocab_size, requests, seed)
        result = throughput(decoder, mixed, max_num_seqs, alone, status.update)
        speeds = _decode_speeds(decoder, status.update) if decode else []
    where = stamp(decoder)
    numbers = {
        "machine": where,
        "model": model,
        "seed": seed,
        "throughput": result.as_dict(),
        "decode": [speed.as_dict() for speed in speeds],
    }
    if json_file == STANDARD_OUTPUT:
        print(json.dumps(numbers, indent=2))
    else:
        show_throughput(result, where, Console())
        if speeds:
            show_decode_speeds(speeds, Console())
        if json_file:
            _write(json_file, json.dumps(numbers, indent=2) + "\n")
    if trace_file:
        _write(trace_file, to_perfetto(result.run("continuous").records))


def _given(ctx: typer.Context) -> set[str]:
    """The names of the options that were written down, and not left as they are."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {n for n, source in sources.items() if source and not source.name.startswith("DEFAULT")}


def _refuse(names: set[str], why: str) -> None:
    for name in sorted(names):
        option = name.removesuffix("_file").replace("_", "-")
        raise typer.BadParameter(f"--{option} {why}")


@dataclass(frozen=True)
class _Weights:
    """Which decoder: a model, or a shape with random weights. Anything else is refused."""

    model: str | None
    shape: str | None
    random: bool

    def __post_init__(self) -> None:
        if self.model is not None and self.shape is not None:
            raise typer.BadParameter(f"--model {self.model} or --model-config {self.shape}: one")
        if self.shape is not None and not self.random:
            raise typer.BadParameter(
                f"--model-config {self.shape} has a shape and no weights: add --random-weights"
            )
        if self.random and self.shape is None:
            raise typer.BadParameter("--random-weights needs a shape: give --model-config")
        if self.model is None and self.shape is None:
            raise typer.BadParameter("--workload needs --model-config or --model")

    @property
    def asked(self) -> str:
        return self.shape or self.model or ""

    @property
    def name(self) -> str:
        """A file of this machine by its last part: a recording says nothing of folders."""
        path = Path(self.asked)
        if not path.exists():
            return self.asked
        path = path.absolute()
        return path.parent.name if path.name == "config.json" else path.name

    def decoder(self, dtype: str, device: str) -> Decoder:
        from mie.terminal.offline import random_decoder, workload_dtype

        dtype = workload_dtype(dtype, device)
        if self.shape is not None:
            return random_decoder(self.shape, dtype, device)
        return load_decoder(self.asked, dtype, device)


def _bench_workload(
    workload: str,
    num_requests: int | None,
    weights: _Weights,
    place: dict[str, str],
    runs: int,
    profile_file: Path | None,
    json_file: Path | None,
    **settings: Any,
) -> None:
    from mie.bench.recorded_run import as_recording, stamp
    from mie.bench.standard_workloads import standard_workload
    from mie.terminal.offline import measure, show_workload

    requests = standard_workload(workload).limited(num_requests)
    decoder = weights.decoder(**place)
    result = measure(
        decoder, requests, model=weights.name, runs=runs, profile=profile_file, **settings
    )
    where = stamp(decoder)
    numbers = json.dumps(as_recording(result, where), indent=2)
    if json_file == STANDARD_OUTPUT:
        print(numbers)
    else:
        show_workload(result, where, Console())
        if json_file:
            _write(json_file, numbers + "\n")
    if profile_file:
        _wrote(profile_file)


def load_decoder(model: str, dtype: str, device: str) -> Decoder:
    """The weights. Its own engine has no memory to speak of: the benchmark builds others."""
    from mie.model import hub

    path = hub.resolve(model)  # shows its own progress when it has to download
    with stderr().status(f"loading {escape(model)}"):
        from mie import LLM

        return LLM(path, dtype=dtype, device=device, num_blocks=2).decoder


def _decode_speeds(decoder: Decoder, tell: Callable[[str], None]) -> list[DecodeSpeed]:
    from mie.bench.decode import decode_speed

    speeds = []
    for count in (1, 8, 32):
        tell(f"decoding {count} at once, the engine's step and a plain loop in turn")
        speeds.append(decode_speed(decoder, count))
    return speeds


def _require_folders(*files: Path | None) -> None:
    """Before the work, not after it: a file can be written only into a folder that exists."""
    for file in files:
        if file and file != STANDARD_OUTPUT and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"{file}: there is no folder {file.parent}")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise MieError(f"{file} cannot be written: {error.strerror}") from error
    _wrote(file)


def _wrote(file: Path) -> None:
    stderr().print(f"wrote {escape(str(file))}", style="dim", soft_wrap=True)
