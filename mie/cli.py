"""``mie``: the engine from a terminal.

Invariant: standard output carries only what was asked for. Everything else (progress, times,
errors) goes to standard error. Whatever the engine refuses is one clear message and exit code 1; a
traceback would be our mistake, not the reader's (``--debug`` shows it all the same). Exit code 2 is
a command that was written wrongly.

Torch takes seconds to import. Commands import what they need when they run, so that ``--help`` and
a mistyped option answer at once.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from mie import __version__
from mie.errors import EmptyPromptError, MieError, RequestError
from mie.terminal.bench_commands import bench
from mie.terminal.console import (
    Device,
    DrawSeed,
    Dtype,
    Model,
    NumBlocks,
    Temperature,
    stderr,
)

if TYPE_CHECKING:
    from mie.engine.llm import LLM
    from mie.sampling_params import SamplingParams


class Commands(TyperGroup):
    """The commands, and what becomes of an error in any of them."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MieError as error:
            if ctx.params["debug"]:
                raise
            stderr().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands,
    help="A small LLM inference engine, built chapter by chapter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Begin with: [bold]mie generate "What is the capital of France?"[/]',
)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mie {__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="MIE_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


System = Annotated[
    str | None, typer.Option(help="What the model is told before the conversation begins.")
]


def load_llm(model: str, dtype: str, device: str, num_blocks: int | None = None) -> LLM:
    """The model, with a word to the person who waits."""
    from mie.model import hub

    path = hub.resolve(model)  # shows its own progress when it has to download
    with stderr().status(f"loading {escape(model)}"):
        from mie import LLM

        return LLM(path, dtype=dtype, device=device, num_blocks=num_blocks)


# -- commands -----------------------------------------------------------------------------------


@app.command(epilog='Example: [bold]mie generate "Why is the sky blue?" --max-tokens 60[/]')
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The question, or - to read it from stdin.")
    ],
    model: Model = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(min=1, help="Where to cut the answer.")] = 256,
    temperature: Temperature = 0.0,
    seed: DrawSeed = None,
    n: Annotated[
        int, typer.Option("--n", min=1, help="How many answers; shown when all are whole.")
    ] = 1,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands: no chat template.")
    ] = False,
    stats: Annotated[bool, typer.Option(help="Say on stderr how long it took.")] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    num_blocks: NumBlocks = None,
) -> None:
    """Answer one prompt, token by token."""
    from mie.sampling_params import SamplingParams
    from mie.terminal.answer import show_answer

    if raw and system is not None:
        raise typer.BadParameter("--system is part of the chat template that --raw leaves out")
    sampling = SamplingParams(max_tokens, temperature, seed, n)
    if n > 1 and sampling.is_greedy:
        raise typer.BadParameter(f"--n {n} answers would be one answer: give a --temperature too")
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise EmptyPromptError("the prompt is empty")
    llm = load_llm(model, dtype, device, num_blocks)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    ids = llm.tokenizer.encode_prompt(text) if raw else llm.chat_prompt(messages)
    if n > 1:
        _generate_several(llm, ids, sampling, stats)
        return
    answer = show_answer(llm.stream(ids, sampling), len(ids), sys.stdout)
    if stats:
        stderr().print(answer.summary(), style="dim", soft_wrap=True)
    if answer.ending == "interrupted":
        raise typer.Exit(130)


def _generate_several(llm: LLM, ids: list[int], sampling: SamplingParams, stats: bool) -> None:
    from mie.terminal.answer import show_answers

    try:
        with stderr().status(f"{sampling.n} answers"):
            result = llm.generate(ids, sampling)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    summary = show_answers(
        result, sys.stdout, lambda text: stderr().print(text, style="dim", soft_wrap=True)
    )
    if stats:
        stderr().print(summary, style="dim", soft_wrap=True)


@app.command(epilog='Example: [bold]mie chat --system "You are a pirate."[/]')
def chat(
    model: Model = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(min=1, help="Where to cut each answer.")] = 512,
    temperature: Temperature = 0.0,
    seed: DrawSeed = None,
    system: System = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    num_blocks: NumBlocks = None,
) -> None:
    """Talk with the model. /help lists what else can be typed; Ctrl-C stops an answer."""
    from mie.terminal.conversation import Conversation

    llm = load_llm(model, dtype, device, num_blocks)
    console = stderr()
    if sys.stdin.isatty():
        console.print(f"{model}: /help for commands, Ctrl-D to leave", style="dim", markup=False)
    Conversation(
        llm,
        console,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    ).run()


@app.command(epilog="Example: [bold]mie check rope --implementation my_rope.py:rope[/]")
def check(
    part: Annotated[
        str | None, typer.Argument(metavar="PART", help="A part of the engine.")
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(
            "--implementation", "-i", help="path.py:Name or module:Name, instead of ours."
        ),
    ] = None,
) -> None:
    """Hold a part, the engine's or yours, against its rules. Without PART: list the parts."""
    from mie import parts, spec

    if part is None:
        _list_specs()
        return
    spec.cases(part)  # an unknown part is refused before anything is imported for it
    chosen = spec.implementation_of(implementation) if implementation else parts.default(part)
    report = spec.check(part, chosen)
    Console().print(report, soft_wrap=True)
    if not report.passed:
        raise typer.Exit(1)


def _list_specs() -> None:
    from importlib import import_module

    from mie import spec

    for name in spec.names():
        first_line = (import_module(f"mie.spec.{name}").__doc__ or "").partition("\n")[0]
        print(f"{name:20} {len(spec.cases(name)):2} rules   {first_line}")


@app.command(epilog="Example: [bold]mie models[/]")
def models() -> None:
    """List the models that need no path, and which of them are on this machine."""
    from mie.model import hub
    from mie.model.packaged import installed

    for name, model in hub.BUILT_IN.items():
        where = installed(model) or f"not fetched yet ({model.wheel_bytes / 1e6:.0f} MB)"
        print(f"{name}  {model.description}\n    {where}")
    for name, folder in _hugging_face_models():
        print(f"{name}\n    {folder}")


def _hugging_face_models() -> list[tuple[str, Path]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        (repo.repo_id, repo.repo_path) for repo in repositories if repo.repo_type == "model"
    )


@app.command(epilog="Example: [bold]mie doctor --json[/]")
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: as JSON, on standard output.")
    ] = False,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Download the built-in model first if it is missing.")
    ] = False,
) -> None:
    """What works on this machine, what doesn't, and what to do about it."""
    from mie.model import hub
    from mie.terminal.doctor import State, examine, show

    if fetch:
        hub.resolve(hub.DEFAULT_MODEL)
    with stderr().status("looking around"):
        findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        show(findings, Console(highlight=False))
    if any(finding.state is State.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8: {error.reason} at {error.start}"
        ) from None
