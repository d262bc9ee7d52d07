"""The block copies that the device has to make before the next step writes anything.

Invariant: all copies can be made at once, in any order. No block is the target of two, no target is
a source of another, and every block named here stays out of the free list until the step that makes
the copies has been launched; after that the device's own order protects it.

Memory is planned on the CPU and the bytes lie on a device that works later. So a table that needs
its own copy of a block writes the copy down here, and this list is for a while an owner of both
blocks: a *pin*, which keeps them but does not write, and is not counted when a table asks whether
it is alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from mie.memory.block_pool import BlockPool


class BlockCopy(NamedTuple):
    """All slots of block ``source``, in all layers, to block ``target``."""

    source: int
    target: int


class BlockCopies:
    """One list for all tables of a pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._waiting: dict[int, int] = {}  # target -> source
        self._launching: list[BlockCopy] = []
        self._pins: Counter[int] = Counter()

    def __len__(self) -> int:
        """How many copies wait for a step."""
        return len(self._waiting)

    @property
    def is_launching(self) -> bool:
        """Whether a step has taken copies and not been launched."""
        return bool(self._launching)

    @property
    def waiting(self) -> list[BlockCopy]:
        """The copies that wait for a step."""
        return [BlockCopy(source, target) for target, source in self._waiting.items()]

    @property
    def launching(self) -> list[BlockCopy]:
        """The copies of a step that has been planned and not yet launched."""
        return list(self._launching)

    def pins(self, block: int) -> int:
        """How many of ``block``'s owners are copies that have not been launched."""
        return self._pins[block]

    def fills(self, block: int) -> bool:
        """Whether a copy into ``block`` waits: it does not hold yet what its owner thinks."""
        return block in self._waiting

    def holder(self, block: int) -> int:
        """The block that holds now what ``block`` holds once its copy has been made."""
        return self._waiting.get(block, block)

    def add(self, source: int, target: int) -> None:
        """Write a copy down. ``target`` is new: nobody has written into it in this step.

        The copy of a copy that still waits is a copy of the first source: it holds the same.
        """
        source = self._waiting.get(source, source)
        self._waiting[target] = source
        for block in (source, target):
            self.pool.incref(block)
            self._pins[block] += 1

    def cancel(self, target: int) -> None:
        """The copy to ``target``, if one waits, is not needed: its last reader has gone."""
        source = self._waiting.pop(target, None)
        if source is not None:
            self._unpin(source)
            self._unpin(target)

    def take(self) -> list[BlockCopy]:
        """The copies for the step that is planned now.

        They stay pinned until ``launched``; between the two no table gives blocks back.
        """
        assert not self._launching, "the copies of the step before were never launched"
        self._launching, self._waiting = self.waiting, {}
        return self.launching

    def launched(self) -> None:
        """The step with the taken copies has been launched: their blocks need no pin."""
        for copy in self._launching:
            self._unpin(copy.source)
            self._unpin(copy.target)
        self._launching = []

    def pinned(self) -> Iterator[int]:
        """Every block that is held here, once for each pin: one of the owners for ``check``."""
        return self._pins.elements()

    def _unpin(self, block: int) -> None:
        self._pins[block] -= 1
        self.pool.decref(block)
