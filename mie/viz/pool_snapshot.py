"""The pool, the tables and the waiting copies at one moment, kept so that it can be drawn later.

Invariant: a snapshot is whole and alone. It holds plain numbers and strings, so nothing that
happens to the pool afterwards changes it; and it agrees with itself: no block counts fewer owners
than can be named.

    pool, tables, copies  --snapshot-->  one BlockState a block, one TableState a table

Only the public side of the pool is read, so a reader's own pool can be drawn too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from mie.memory.block_copies import BlockCopies, BlockCopy
from mie.memory.block_pool import SCRATCH_BLOCK, BlockPool
from mie.viz.svg import visible


class Owner(Protocol):
    """Whoever owns blocks, a ``BlockTable`` for one: its blocks in order, and its tokens."""

    @property
    def blocks(self) -> Sequence[int]: ...

    @property
    def num_tokens(self) -> int: ...


Tables = Mapping[str, Owner | Sequence[int]]


@dataclass(frozen=True)
class BlockState:
    """One block. ``owners`` are the tables that list it, ``pins`` the copies that hold it.

    ``count`` is the pool's reference count. ``filled`` slots hold tokens, whose texts are
    ``tokens``; it is None where no table that was shown says how many.
    """

    owners: tuple[str, ...] = ()
    pins: int = 0
    count: int = 0
    filled: int | None = None
    cached: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def others(self) -> int:
        """Owners that are neither a table that was shown nor a copy."""
        return self.count - len(self.owners) - self.pins


@dataclass(frozen=True)
class TableState:
    """One table: its blocks in order, and what its tokens say, if that was given."""

    name: str
    blocks: tuple[int, ...]
    num_tokens: int
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """One moment. ``free`` is in the order of handing out; ``note`` says what has happened.

    ``waiting`` copies are written down and wait for a step; ``launching`` ones belong to a step
    that has not been launched.
    """

    note: str
    block_size: int
    blocks: tuple[BlockState, ...]
    tables: tuple[TableState, ...]
    free: tuple[int, ...]
    waiting: tuple[BlockCopy, ...] = ()
    launching: tuple[BlockCopy, ...] = ()

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        return self.launching + self.waiting

    def table(self, name: str) -> TableState | None:
        """The table of that name, if it was there at this moment."""
        return next((table for table in self.tables if table.name == name), None)

    def changed(self, before: Snapshot | None) -> frozenset[int]:
        """The blocks whose owners, count, tokens or place in the prefix cache are not as before."""
        if before is None:
            return frozenset()
        pairs = zip(before.blocks, self.blocks, strict=True)
        return frozenset(block for block, (old, new) in enumerate(pairs) if old != new)


def snapshot(
    pool: BlockPool,
    tables: Tables,
    note: str,
    copies: BlockCopies | None = None,
    tokens: Mapping[str, Sequence[str]] | None = None,
) -> Snapshot:
    """What ``pool`` looks like now, with ``tables`` by name; ``note`` says what has happened.

    A plain list of blocks counts as a table whose blocks are full. ``tokens`` gives the text of
    each token of a table, to be written into its slots.

    Raises ValueError where a table lists a block that the pool does not have or counts fewer
    owners for, and where the number of texts is not that of the table's tokens.
    """
    tokens = tokens or {}
    unknown = sorted(tokens.keys() - tables.keys())
    if unknown:
        raise ValueError(f"tokens are given for {unknown}, and the tables are {list(tables)}")
    states = tuple(
        _table(name, table, pool.block_size, tokens.get(name)) for name, table in tables.items()
    )
    for state in states:
        for block in state.blocks:
            if not SCRATCH_BLOCK < block < pool.num_blocks:
                raise ValueError(
                    f"table {state.name} lists block {block}; "
                    f"the pool has blocks 1 to {pool.num_blocks - 1}"
                )
    blocks = tuple(_block(block, pool, states, copies) for block in range(pool.num_blocks))
    waiting, launching = _pairs(copies)
    return Snapshot(
        note, pool.block_size, blocks, states, tuple(pool.free_blocks()), waiting, launching
    )


def _table(
    name: str, table: Owner | Sequence[int], size: int, tokens: Sequence[str] | None
) -> TableState:
    if isinstance(table, Sequence):
        blocks, num_tokens = tuple(table), len(table) * size
    else:
        blocks, num_tokens = tuple(table.blocks), table.num_tokens
    if tokens is not None and len(tokens) != num_tokens:
        raise ValueError(f"table {name} has {num_tokens} tokens, and {len(tokens)} texts are given")
    return TableState(name, blocks, num_tokens, tuple(tokens or ()))


def _block(
    block: int, pool: BlockPool, tables: Iterable[TableState], copies: BlockCopies | None
) -> BlockState:
    owners: list[str] = []
    filled: int | None = None
    texts: tuple[str, ...] = ()
    for table in tables:
        for index in (i for i, listed in enumerate(table.blocks) if listed == block):
            begin = index * pool.block_size
            end = min(begin + pool.block_size, table.num_tokens)
            owners.append(table.name)
            filled = max(filled or 0, end - begin)
            texts = max(texts, table.tokens[begin:end], key=len)
    pins = 0 if copies is None else copies.pins(block)
    count = pool.ref_count(block)
    if count < len(owners) + pins:
        raise ValueError(
            f"block {block} counts {plural(count, 'owner')}, "
            f"and {len(owners)} tables and {pins} copies hold it"
        )
    return BlockState(tuple(owners), pins, count, filled, pool.is_cached(block), texts)


def _pairs(copies: BlockCopies | None) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
    """The copies that wait for a step, and those of the step that is launched now."""
    if copies is None:
        return (), ()
    return tuple(copies.waiting), tuple(copies.launching)


# -- in words --------------------------------------------------------------------------------------


def words(now: Snapshot, before: Snapshot | None) -> str:
    """Everything that a drawing of ``now`` shows: owners, counts, slots, free list, copies."""
    lines = [now.note, *(_table_words(table) for table in now.tables)]
    alike: dict[str, list[int]] = {}
    for block, state in enumerate(now.blocks):
        if state.count:
            alike.setdefault(_block_words(state, now.block_size), []).append(block)
    lines += [f"{numbered(blocks).capitalize()}: {what}." for what, blocks in alike.items()]
    lines.append(_free_words(now))
    lines += _copy_words(now.waiting, "wait for a step")
    lines += _copy_words(now.launching, "belong to the step that is about to be launched")
    changed = sorted(now.changed(before))
    if changed:
        lines.append(f"Changed: {numbered(changed)}.")
    return "\n".join(lines)


def _copy_words(copies: Sequence[BlockCopy], do: str) -> list[str]:
    arrows = ", ".join(f"{source} → {target}" for source, target in copies)
    return [f"Copies that {do}: {arrows}."] if copies else []


def _table_words(table: TableState) -> str:
    where = numbered(table.blocks) if table.blocks else "no block"
    said = f" “{legible(''.join(table.tokens))}”" if table.tokens else ""
    return f"{table.name}: {plural(table.num_tokens, 'token')}{said} in {where}."


def _block_words(state: BlockState, size: int) -> str:
    holders = list(state.owners)
    if state.pins:
        holders.append("a copy" if state.pins == 1 else f"{state.pins} copies")
    if state.others:
        holders.append(plural(state.others, "owner") + " not shown")
    said = " and ".join([*filter(None, [", ".join(holders[:-1])]), holders[-1]])
    if state.count > 1:
        said += f", count {state.count}"
    if state.filled is not None:
        said += f", {state.filled} of {size} slots filled"
    return said + (", cached" if state.cached else "")


def _free_words(now: Snapshot) -> str:
    total, free = len(now.blocks) - 1, len(now.free)
    said = f"Block {SCRATCH_BLOCK} is scratch; {free} of {total} others free"
    parts = [
        ("cached " if cached else "") + listed(list(blocks))
        for cached, blocks in groupby(now.free, key=lambda block: now.blocks[block].cached)
    ]
    return said + (f", next first: {', then '.join(parts)}." if free else ".")


def numbered(blocks: Sequence[int]) -> str:
    """ "block 9", "blocks 9, 4, 11 to 15"."""
    return f"{'block' if len(blocks) == 1 else 'blocks'} {listed(blocks)}"


def listed(blocks: Sequence[int]) -> str:
    """ "9, 4, 11 to 15": the numbers in their order, five or more in a row as a range."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 4 else ", ".join(map(str, run)) for run in runs
    )


def legible(text: str) -> str:
    """A text to be read in a sentence: its blanks stay, its other unprintable signs are shown."""
    return " ".join(visible(word, max(len(word), 1) * 10) for word in text.split(" "))


def plural(count: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
