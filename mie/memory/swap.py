"""A second pool in the host's memory: where the blocks of a preempted sequence can wait.

Invariant: a host block has one owner or none. Bytes move when a step is launched, and a step moves
all blocks out before it moves any in. So a block that leaves the host in this step may not be given
away again in the same step: it becomes free when the step has been launched.

    preempted    device 7 2 9  ->  host 0 1 2       blocks to copy out; 7, 2, 9 are free at once
    comes back   host 0 1 2    ->  device 4 8 3     other device blocks; the tables say where

What it costs is bytes over the bus, twice; what it saves is computing the tokens again. When there
is no room for all blocks of a sequence, it gets none, and is computed again.

Cost: a step for each block that moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mie.errors import ConfigError


class SwapOut(NamedTuple):
    """All slots of block ``device``, in all layers, to block ``host`` of the host's memory."""

    device: int
    host: int


class SwapIn(NamedTuple):
    """All slots of block ``host`` of the host's memory, in all layers, to block ``device``."""

    host: int
    device: int


class HostPool:
    """``num_blocks`` blocks of host memory, none of them scratch. 0 is a pool without any room."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ConfigError(f"a host pool of {num_blocks} blocks; it must be 0 or more")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._leaving: list[int] = []
        self._outs: list[SwapOut] = []
        self._ins: list[SwapIn] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def swap_out(self, blocks: Sequence[int]) -> list[int] | None:
        """Host blocks for the content of the device's ``blocks``, in their order; None, and nothing
        has changed, if there are too few. The caller may give the device blocks back at once: they
        are read before anything is written into them.

        What has not come in yet is still here, and stays.
        """
        here = {move.device: move.host for move in self._ins}
        if blocks and all(block in here for block in blocks):
            self._ins = [move for move in self._ins if move.device not in {*blocks}]
            return [here[block] for block in blocks]
        assert not here.keys() & {*blocks}, f"{blocks}: some of it is still on its way in"
        if len(blocks) > len(self._free):
            return None
        taken = [self._free.pop() for _ in blocks]
        self._outs += map(SwapOut, blocks, taken)
        return taken

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """The content of ``host_blocks`` moves to the device's ``blocks``, in their order."""
        assert len(host_blocks) == len(blocks), f"{host_blocks} to {blocks}"
        self._ins += map(SwapIn, host_blocks, blocks)

    def cancel(self, blocks: Sequence[int]) -> None:
        """Nobody wants the content of the device's ``blocks`` any longer that no step has taken."""
        if self._ins:
            gone = {*blocks}
            self._free += [move.host for move in self._ins if move.device in gone]
            self._ins = [move for move in self._ins if move.device not in gone]

    @property
    def waiting(self) -> tuple[tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """What ``take`` would return."""
        return tuple(self._outs), tuple(self._ins)

    def drop(self, host_blocks: Sequence[int]) -> None:
        """Nobody will come back for ``host_blocks``; they may be on their way here still."""
        gone = set(host_blocks)
        self._outs = [move for move in self._outs if move.host not in gone]
        self._free += host_blocks

    def take(self) -> tuple[tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """The moves for the step that is planned now: all out first, then all in."""
        outs, ins = self.waiting
        self._outs, self._ins = [], []
        self._leaving += [move.host for move in ins]
        return outs, ins

    def launched(self) -> None:
        """The step with the taken moves has been launched: what left the host is free there."""
        self._free += self._leaving
        self._leaving = []

    def check(self, owners: Sequence[Sequence[int]]) -> None:
        """Prove that every host block is free, leaving, or one sequence's. For tests."""
        used = [block for blocks in owners for block in blocks]
        used += [move.host for move in self._ins]
        everything = sorted([*self._free, *self._leaving, *used])
        assert everything == list(range(self.num_blocks)), (self._free, self._leaving, used)
