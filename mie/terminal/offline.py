"""``mie bench throughput --workload``: which decoder, a bar while it runs, and tables of what came.

Invariant: the bar is drawn twice a second, between two steps and in no thread of its own, so that
drawing takes next to nothing from the engine that is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from mie.bench.memory_tables import percent
from mie.terminal.bench import show_rows
from mie.terminal.console import stderr

if TYPE_CHECKING:
    from mie.bench.offline_result import OfflineRun, Split, WorkloadResult
    from mie.bench.standard_workloads import StandardWorkload
    from mie.model.decoder import Decoder

KERNELS_SHOWN = 6
NAME_WIDTH = 48  # of a kernel: templates have names as long as a page


def workload_dtype(dtype: str, device: str) -> str:
    """What ``auto`` means here: bfloat16 on a GPU, as other engines are measured; else float32.

    Raises ConfigError for a dtype or a device that is none.
    """
    from mie.config import EngineConfig
    from mie.engine.place import choose_device

    EngineConfig(dtype=dtype)
    kind = choose_device(device).type
    if dtype != "auto":
        return dtype
    return "bfloat16" if kind == "cuda" else "float32"


def random_decoder(shape: str, dtype: str, device: str) -> Decoder:
    """Random weights in the shape of that name, or of that ``config.json``."""
    from mie.bench import model_shapes
    from mie.engine.place import DTYPES, choose_device

    config = model_shapes.shape(shape)
    with stderr().status(f"drawing the weights of {escape(shape)}"):
        return model_shapes.random_decoder(config, DTYPES[dtype], choose_device(device))


def measure(decoder: Decoder, workload: StandardWorkload, **settings: Any) -> WorkloadResult:
    """``mie.bench.offline.measure_workload`` with a bar."""
    from mie.bench.offline import measure_workload

    with bar() as tell:
        return measure_workload(decoder, workload, tell=tell, **settings)


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """``tell(doing, out, total)`` draws it, on a terminal; each thing that is done has a line."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, auto_refresh=False, disable=not console.is_terminal
    ) as progress:
        tasks: dict[str, Any] = {}

        def tell(doing: str, out: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = progress.add_task(doing, total=total)
            progress.update(tasks[doing], completed=out)
            progress.refresh()

        yield tell


def show_workload(result: WorkloadResult, where: Mapping[str, Any], console: Console) -> None:
    """All runs, the bound, and where a step goes."""
    best = result.best
    share = result.share_of_bound
    head = ("", "output tokens/s", "seconds", "steps", "of the bound")
    rows = [
        (
            f"run {number}" + (", best" if run is best else ""),
            f"{run.tokens_per_second:,.1f}",
            f"{run.seconds:.2f}",
            f"{run.steps:,}",
            _share(result, run),
        )
        for number, run in enumerate(result.runs, start=1)
    ]
    if result.bound:
        bound = result.bound
        rows.append(
            ("bound", f"{bound.tokens_per_second:,.0f}", f"{bound.seconds:.2f}", "", percent(1, 0))
        )
    title = f"{result.model}, {result.workload}: {where['dtype']} on {where['device']}"
    show_rows(title, head, rows, console)
    if result.bound and share is not None:
        bound = result.bound
        reading = (
            f"{best.tokens_per_second:,.0f} output tokens a second, {percent(share, 0)} of what "
            f"memory and matrix units allow. The bound: {bound.kv_seconds:.2f} s for K and V, "
            f"{bound.weight_seconds:.2f} s for weights, {bound.prefill_seconds:.2f} s for prompts; "
            f"limits {result.bound_says}."
        )
    else:
        reading = f"{best.tokens_per_second:,.1f} output tokens a second; {result.bound_says}."
    _say(
        f"{reading} {result.num_requests:,} requests, {result.prompt_tokens:,} tokens in, "
        f"{best.output_tokens:,} out, at most {result.settings['max_num_seqs']:,} at once.",
        console,
    )
    _show_split(result.split, console)
    commit = f", commit {where['commit'][:12]}" if where["commit"] else ""
    console.print(
        f"{where['gpu']}, torch {where['torch']}, {where['date']}{commit}",
        style="dim",
        markup=False,
        highlight=False,
    )


def _show_split(split: Split, console: Console) -> None:
    gpu = split.gpu
    cpu = f"{split.schedule_seconds * 1e3:.3f} schedule, {split.launch_seconds * 1e3:.3f} "
    cpu += "launch" if gpu else "model and sampler"
    cpu += f", {split.update_seconds * 1e3:.3f} update"
    rows = [
        ("whole", _ms(split.wall_seconds), f"{split.window.steps} steps, half of the output out"),
        ("GPU busy", _ms(split.gpu_seconds), f"{gpu.launches:.0f} kernels" if gpu else "no GPU"),
        ("GPU idle", _ms(split.gap_seconds), "whole - GPU busy" if gpu else "no GPU"),
        ("CPU busy", _ms(split.cpu_seconds), cpu),
    ]
    show_rows("A step, in milliseconds", ("", "ms", "of that"), rows, console)
    if gpu:
        kernels = [
            (_short(kernel.name), _ms(kernel.seconds), f"{kernel.launches:.0f}")
            for kernel in gpu.kernels[:KERNELS_SHOWN]
        ]
        show_rows("Kernels that take most of a step", ("", "ms", "times"), kernels, console)


def _share(result: WorkloadResult, run: OfflineRun) -> str:
    return percent(result.bound.seconds / run.seconds) if result.bound else "–"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3f}"


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"


def _say(text: str, console: Console) -> None:
    console.print(text, markup=False, highlight=False)
