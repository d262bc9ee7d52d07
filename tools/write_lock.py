"""Print requirements.lock: the versions, as installed, of everything that `mie[dev]` needs.

The walk follows the installed packages' own requirements, so what happens to lie in the
environment for other reasons stays out, and so do requirements of other platforms. `+cpu` and
the like are cut off: the same lock serves a machine that takes torch's CPU build from a folder
of wheels, and one that takes CUDA's.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEADER = f"""\
# Exact versions of everything that the project needs to run, test and build its book.
# Made by `make lock` from a tested environment (Linux, Python {sys.version.split()[0]}).
# To change one: install the version you want into .venv, run `make test book`, then `make lock`.
"""
LINUX_ONLY = {"triton"}


def locked(root: str) -> dict[str, str]:
    """`{name: version}` of everything reachable from the requirement `root`, itself excluded."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(root)]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is required but not installed: run `make setup` first")
        found[name] = installed.version.partition("+")[0]
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            children = map(Requirement, installed.requires or ())
            todo += [c for c in children if c.marker is None or c.marker.evaluate({"extra": extra})]
    del found[canonicalize_name(Requirement(root).name)]
    return found


def main() -> None:
    print(HEADER, end="")
    for name, version in sorted(locked("mie[dev]").items()):
        # torch's CUDA build names NVIDIA's libraries itself, with their versions
        if not name.startswith(("nvidia-", "cuda-")):
            print(
                f"{name}=={version}" + (' ; sys_platform == "linux"' if name in LINUX_ONLY else "")
            )


if __name__ == "__main__":
    main()
