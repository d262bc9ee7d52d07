"""``mie bench``: the benchmarks as commands.

Invariant: as in ``mie.cli``: standard output carries the tables or the numbers, standard error the
progress, and a command imports what it needs when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mie.errors import MieError
from mie.terminal.console import Device, Dtype, Model, stderr

if TYPE_CHECKING:
    from mie.bench.decode import DecodeSpeed
    from mie.model.decoder import Decoder

bench = typer.Typer(
    help="Measure the engine. [bold]memory[/] counts; [bold]pool[/] and [bold]throughput[/] take "
    "times.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
STANDARD_OUTPUT = Path("-")
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


@bench.command("throughput", epilog="Example: [bold]mie bench throughput --requests 16[/]")
def bench_throughput(
    model: Model = "smollm2-135m",
    requests: Annotated[int, typer.Option(min=1, help="How many, of mixed length.")] = 32,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="How many run at once.")] = 8,
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
) -> None:
    """Tokens a second on this machine: one at a time, in static waves, continuously.

    Requests of mixed length wait from the start; prompts are random, answers have fixed lengths.

    One to two minutes for the built-in model on two quiet cores.
    """
    from mie.bench.throughput import mixed_workload, throughput
    from mie.scheduling.trace import to_perfetto
    from mie.terminal.bench import show_decode_speeds, show_throughput, stamp

    _require_folders(json_file, trace_file)
    decoder = load_decoder(model, dtype, device)
    with stderr().status("") as status:
        workload = mixed_workload(decoder.config.vocab_size, requests, seed)
        result = throughput(decoder, workload, max_num_seqs, alone, status.update)
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
    stderr().print(f"wrote {escape(str(file))}", style="dim", soft_wrap=True)
