"""Long random runs of the memory parts, next to models too plain to be wrong.

Invariant: a model keeps no structure that has to stay in order: one list that is searched, a copy
of every token for every table, a dictionary of every known beginning. Seeds are fixed, so a run
that fails does so again, at the same step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from mie.memory.block_pool import INVALID_BLOCK, BlockPool, blocks_needed
from mie.memory.block_table import BlockTable
from mie.spec.device import SIZE, CacheClass, Device, Engine, TableClass, pool_state
from mie.spec.expect import equal

# -- a pool, next to one list -------------------------------------------------------------------


class NaivePool:
    """One list of free blocks, in the order in which they are handed out."""

    def __init__(self, free: list[int]) -> None:
        self.free = free
        self.owners = dict.fromkeys(sorted(free), 0)
        self.cached: set[int] = set()
        self.evicted: list[int] = []  # cached blocks that were handed out

    def choices(self) -> dict[str, list[int]]:
        """What may be asked of the pool now, and of which blocks."""
        used = [block for block, owners in self.owners.items() if owners]
        known = sorted(self.cached)
        return {
            "allocate": [INVALID_BLOCK],  # of no block
            "incref": sorted({*used, *known}),
            "decref": used,
            "mark_cached": sorted({*used} - self.cached),
            "unmark_cached": known,
        }

    def allocate(self) -> int:
        if not self.free:
            return INVALID_BLOCK
        block = self.free.pop(0)
        self.owners[block] = 1
        if block in self.cached:
            self.cached.remove(block)
            self.evicted.append(block)
        return block

    def incref(self, block: int) -> None:
        if not self.owners[block]:
            self.free.remove(block)
        self.owners[block] += 1

    def decref(self, block: int) -> None:
        self.owners[block] -= 1
        if not self.owners[block]:
            self.free.insert(len(self.free) if block in self.cached else 0, block)

    def mark_cached(self, block: int) -> None:
        self.cached.add(block)

    def unmark_cached(self, block: int) -> None:
        self.cached.discard(block)
        if not self.owners[block]:
            self.free.remove(block)
            self.free.insert(0, block)

    def state(self) -> dict[str, object]:
        """As ``pool_state`` says it of a pool."""
        return {"num_free": len(self.free), "owners": self.owners, "cached": sorted(self.cached)}


def trace_of_pool(new_pool: Callable[[int, int], BlockPool]) -> None:
    """3,000 random calls of a pool of 7 blocks."""
    rng = random.Random(4)
    pool = new_pool(8, SIZE)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    blocks = [pool.allocate() for _ in range(7)]
    for block in blocks:
        pool.decref(block)
    naive = NaivePool(blocks[::-1])
    for step in range(3000):
        choices = naive.choices()
        # Stretches of more taking and stretches of more giving back, so that both ends are reached.
        weights = (3, 2, 3, 2, 1) if step // 100 % 2 else (2, 1, 4, 3, 1)
        [name] = rng.choices(list(choices), weights)
        if not choices[name]:
            continue
        block = rng.choice(choices[name])
        said = f"step {step}: {name}" + (f"({block})" if name != "allocate" else "()")
        arguments = [] if name == "allocate" else [block]
        expected = getattr(naive, name)(*arguments)
        equal(getattr(pool, name)(*arguments), expected, said)
        equal(pool_state(pool), naive.state(), f"the pool after {said}")
        equal(list(pool.free_blocks()), naive.free, f"the free blocks after {said}")
        equal(evicted, naive.evicted, f"what was evicted after {said}")


# -- tables, next to copies of everything -------------------------------------------------------


class NaiveTable:
    """All tokens of ``table``, and those of them that its next step will write."""

    def __init__(self, table: BlockTable, tokens: Sequence[int] = ()) -> None:
        self.table = table
        self.tokens = list(tokens)
        self.waiting: dict[int, int] = {}  # position -> token


def trace_of_tables(Table: TableClass) -> None:
    """600 steps of up to six tables in a pool of 13 blocks, with up to four calls in each."""
    rng = random.Random(11)
    device = Device(Table, 14)
    pool, all_of = device.pool, [NaiveTable(device.table())]
    for step in range(600):
        for _ in range(rng.randrange(1, 5)):
            naive = rng.choice(all_of)
            what = rng.choice(
                ("append", "append", "append", "fork", "write", "write", "cut", "end")
            )
            said = f"step {step}: {what}"
            change(rng, device, naive, what, said)
            if what == "fork" and not naive.waiting and len(all_of) < 6:
                all_of.append(NaiveTable(naive.table.fork(), naive.tokens))
            if what == "end":
                naive.table.release()
                all_of.remove(naive)
            while len(all_of) < 2:
                all_of.append(NaiveTable(device.table()))
            for table in (naive.table for naive in all_of):
                needed = blocks_needed(table.num_tokens, SIZE)
                equal(
                    len(table.blocks), needed, f"blocks of {table.num_tokens} tokens after {said}"
                )
            device.owned_by(*(naive.table for naive in all_of), what=f"after {said}")
        device.step((n.table, p, token) for n in all_of for p, token in n.waiting.items())
        for naive in all_of:
            naive.waiting = {}
            device.holds(naive.table, naive.tokens, f"a table after step {step}")
    for naive in all_of:
        naive.table.release()
    equal((pool.num_free, len(device.copies)), (13, 0), "(free blocks of 13, copies) at the end")


def change(rng: random.Random, device: Device, naive: NaiveTable, what: str, said: str) -> None:
    """Do ``what`` to a table and to its model, if it changes the tokens."""
    table, tokens, free = naive.table, naive.tokens, device.pool.num_free
    if what == "append":
        new = [rng.randrange(10**6) for _ in range(rng.randrange(2 * SIZE))]
        needed = table.blocks_to_append(len(new))
        fits = table.append(len(new))
        equal(fits, needed <= free, f"{said}({len(new)}), which needs {needed} of {free} blocks")
        if fits:
            naive.waiting |= dict(enumerate(new, start=len(tokens)))
            tokens += new
    elif what == "write" and tokens:
        position, token = rng.randrange(len(tokens)), rng.randrange(10**6)
        if table.writable(position):
            tokens[position] = naive.waiting[position] = token
        else:
            equal(free, 0, f"{said} at {position} was refused; free blocks")
    elif what == "cut":
        kept = rng.randrange(len(tokens) + 1)
        table.truncate(kept)
        del tokens[kept:]
        naive.waiting = {p: token for p, token in naive.waiting.items() if p < kept}


# -- a cache, next to a dictionary of beginnings ------------------------------------------------

Beginning = tuple[str, tuple[int, ...]]  # a salt, and the tokens up to the end of a block


def beginnings(text: Sequence[int], salt: str, num_tokens: int) -> list[Beginning]:
    """One for each full block among the first ``num_tokens``."""
    ends = range(SIZE, num_tokens + 1, SIZE)
    return [(salt, tuple(text[:end])) for end in ends]


def trace_of_cache(Cache: CacheClass) -> None:
    """1,000 steps of up to four sequences in a pool of 27 blocks.

    Texts are made of three different blocks, so that many begin alike.
    """
    rng = random.Random(7)
    engine = Engine(Cache, 28)
    known: dict[Beginning, int] = {}
    running: list[tuple[BlockTable, list[int], str]] = []
    for step in range(1000):
        what = rng.choice(("new", "new", "go on", "fork", "cut", "end", "end", "end"))
        if what == "new" and len(running) < 4:
            text = some_blocks(rng, rng.randrange(1, 7))
            text, salt = text[: rng.randrange(1, len(text) + 1)], rng.choice(("", "", "red"))
            expected = []
            for said in beginnings(text, salt, len(text) - 1):
                if said not in known:
                    break
                expected.append(known[said])
            found = engine.cache.match(text, salt)
            equal(list(found), expected, f"step {step}: match of {text} with the salt {salt!r}")
            running.append((engine.device.table(found), text, salt))
        if not running:
            continue
        table, text, salt = rng.choice(running)
        if what == "end":
            table.release()
            running.remove((table, text, salt))
            continue
        if what == "fork" and len(running) < 4:
            running.append((table.fork(), list(text), salt))
        elif what == "cut":
            table.truncate(rng.randrange(table.num_tokens + 1))
            text[:] = text[: table.num_tokens] + some_blocks(rng, 1)
        elif what == "go on":
            text += some_blocks(rng, 1)[: rng.randrange(1, SIZE + 1)]
        before = {*table.blocks}
        computed = text[: table.num_tokens + rng.randrange(3 * SIZE)]
        if table.blocks_to_append(len(computed) - table.num_tokens) <= engine.pool.num_free:
            engine.compute(table, computed, salt)
        taken = {*table.blocks} - before
        gone = [said for said, block in known.items() if block in taken]
        known = {said: block for said, block in known.items() if not continues(said, gone)}
        engine.cache.insert(table, text, table.num_tokens, salt)
        for said, block in zip(
            beginnings(text, salt, table.num_tokens), table.blocks, strict=False
        ):
            if len(said[1]) > SIZE and (said[0], said[1][:-SIZE]) not in known:
                break  # the block before was forgotten
            known.setdefault(said, block)
            equal(block, known[said], f"step {step}: the block of {said}, inserted")
        engine.holds(table, text, salt)
        engine.device.owned_by(*(t for t, _, _ in running), what=f"after step {step}, {what}")


def continues(said: Beginning, others: Sequence[Beginning]) -> bool:
    """Whether ``said`` is one of ``others`` or goes on after it."""
    return any(said[0] == salt and said[1][: len(tokens)] == tokens for salt, tokens in others)


def some_blocks(rng: random.Random, count: int) -> list[int]:
    """The tokens of ``count`` of three different blocks."""
    starts = (rng.choice((10, 10, 10, 10, 20, 30)) for _ in range(count))
    return [start + offset for start in starts for offset in range(SIZE)]
