"""What any block pool must do.

    pool = Pool(num_blocks, block_size)       raises ConfigError for sizes that leave no block
    pool.num_blocks, pool.block_size          as given; block 0 is scratch
    pool.num_free                             how many blocks can be handed out now
    pool.allocate()                           one of them, with one owner, or INVALID_BLOCK
    pool.incref(block)                        one more owner
    pool.decref(block)                        one less; without any, the block is free
    pool.ref_count(block)                     how many owners it has
    pool.mark_cached(block)                   a prefix cache knows what is in the block
    pool.unmark_cached(block)                 and has forgotten it
    pool.is_cached(block)                     whether one knows it
    pool.free_blocks()                        what allocate would hand out, in this order
    pool.on_evict                             called with each cached block that is handed out

Free blocks are handed out in this order::

    not cached, last freed first   |   cached, least recently freed first

How a pool keeps that order is its own affair, and what it costs isn't judged here: the benchmark of
``mie.bench.pool`` counts it. A call that must be refused may raise anything.
"""

from __future__ import annotations

from collections.abc import Callable

from mie.errors import ConfigError
from mie.memory.block_pool import INVALID_BLOCK, BlockPool
from mie.spec.device import cached, pool_refuses, pool_state, taken
from mie.spec.expect import CounterExample, equal, refuses
from mie.spec.traces import trace_of_pool

PoolClass = Callable[[int, int], BlockPool]

# -- handing out --------------------------------------------------------------------------------


def case_sizes(Pool: PoolClass) -> None:
    """`num_blocks` and `block_size` are as given, and at first all blocks but block 0 are free.
    Otherwise: tables count in blocks of another size, or admission waits for a block that isn't
    there."""
    pool = Pool(7, 3)
    got = (pool.num_blocks, pool.block_size, pool.num_free)
    equal(got, (7, 3, 6), "(num_blocks, block_size, num_free) of Pool(7, 3)")


def case_sizes_refused(Pool: PoolClass) -> None:
    """A pool without a block to hand out, or with blocks of no slot, is a ConfigError. Otherwise:
    the engine starts, and the first request waits for ever."""
    for sizes in ((1, 16), (0, 16), (-4, 16), (8, 0), (8, -16)):
        refuses(f"Pool{sizes}", Pool, *sizes, error=ConfigError)


def case_scratch_kept(Pool: PoolClass) -> None:
    """Block 0 is never handed out and has no owner. Otherwise: the padded rows of a batch, which
    all write there, write into somebody's tokens."""
    pool = Pool(5, 4)
    for life in (1, 2, 3):
        blocks = taken(pool, 4)
        if 0 in blocks:
            raise CounterExample(f"the 4 blocks of Pool(5, 4), time {life}: got {blocks}")
        equal(
            (pool.ref_count(0), bool(pool.is_cached(0))), (0, False), "(owners, cached) of block 0"
        )
        for block in blocks:
            pool.decref(block)


def case_each_once(Pool: PoolClass) -> None:
    """No block is handed out while it has an owner. Otherwise: two requests write into the same
    slots, and each answers with the other's words."""
    pool = Pool(9, 4)
    equal(sorted(taken(pool, 8)), list(range(1, 9)), "the 8 blocks of Pool(9, 4)")


def case_one_owner(Pool: PoolClass) -> None:
    """A block that is handed out has one owner, whatever its earlier life was, and one block less
    is free. Otherwise: it comes back too early or never."""
    pool = Pool(2, 4)
    for life in (1, 2, 3):
        block = pool.allocate()
        equal(pool.ref_count(block), 1, f"owners of a new block, life {life}")
        equal(pool.num_free, 0, f"free blocks of Pool(2, 4) after one allocate, life {life}")
        pool.incref(block)
        pool.decref(block)
        pool.decref(block)
        equal(pool.num_free, 1, f"free blocks after its last owner, life {life}")


def case_empty(Pool: PoolClass) -> None:
    """Without a free block `allocate` returns INVALID_BLOCK and changes nothing. Otherwise: running
    out of memory, which a scheduler expects and can mend, ends the engine."""
    pool = Pool(4, 4)
    taken(pool, 3)
    before = pool_state(pool)
    for attempt in (1, 2):
        got = pool.allocate()
        equal(got, INVALID_BLOCK, f"allocate without a free block, attempt {attempt}")
        equal(pool_state(pool), before, "the pool after it")
    pool.decref(2)
    equal(pool.allocate(), 2, "allocate after block 2 was given back")


def case_pools_apart(Pool: PoolClass) -> None:
    """Two pools have nothing in common. Otherwise: the draft model's memory and the target's are
    the same list, and each hands out what the other uses."""
    one, other = Pool(4, 4), Pool(4, 4)
    taken(one, 3)
    equal(other.num_free, 3, "free blocks of a pool after all of another were taken")
    equal(sorted(taken(other, 3)), [1, 2, 3], "blocks of a pool after all of another were taken")


# -- owners -------------------------------------------------------------------------------------


def case_last_owner(Pool: PoolClass) -> None:
    """A shared block is free after its last owner has given it back, and not before. Otherwise: one
    of two forked sequences ends, and the other reads what a third has written."""
    pool = Pool(3, 4)
    shared = pool.allocate()
    pool.incref(shared)
    pool.incref(shared)
    for owners in (2, 1):
        pool.decref(shared)
        equal(pool.ref_count(shared), owners, "owners of a block that had 3")
        equal(pool.num_free, 1, f"free blocks of 2, one with {owners} owners")
    pool.decref(shared)
    equal(pool.num_free, 2, "free blocks after the last owner")
    equal(pool.allocate(), shared, "the block that is handed out next")


def case_given_back_once(Pool: PoolClass) -> None:
    """Giving back a block without an owner is refused and changes nothing. Otherwise: it stands in
    the free list twice, and later two requests are handed the same memory."""
    pool = Pool(4, 4)
    kept, block = taken(pool, 2)
    pool.decref(block)
    pool_refuses(pool, f"decref of block {block}, which is free", pool.decref, block)
    got = [pool.allocate() for _ in range(3)]
    equal(sorted(got)[0], INVALID_BLOCK, f"3 allocates from 2 free blocks, {got}: the least")
    equal(sorted({kept, *got[:2]}), [1, 2, 3], "all blocks, each with one owner")


def case_incref_needs_content(Pool: PoolClass) -> None:
    """A new owner for a free block that isn't cached is refused and changes nothing. Otherwise: a
    sequence holds a block that the next `allocate` hands to another."""
    pool = Pool(4, 4)
    block = pool.allocate()
    pool.decref(block)
    pool_refuses(pool, f"incref of block {block}, which is free and not cached", pool.incref, block)


def case_no_such_block(Pool: PoolClass) -> None:
    """No owner and no mark is given to a number that is no block, or taken from it. Otherwise:
    INVALID_BLOCK, used unchecked, is Python's last element, and somebody's block is given back."""
    for marked in (False, True):
        pool = Pool(4, 4)
        for block in taken(pool, 3):
            if marked:
                pool.mark_cached(block)
        for name in ("incref", "decref", "mark_cached", "unmark_cached"):
            for block in (INVALID_BLOCK, 0, 4):
                what = f"{name}({block}) of Pool(4, 4), all {'cached' if marked else 'used'}"
                pool_refuses(pool, what, getattr(pool, name), block)


# -- which block goes next ----------------------------------------------------------------------


def case_last_freed_first(Pool: PoolClass) -> None:
    """Of blocks without known content, the one freed last is handed out first. Otherwise: each step
    touches memory that has left the device's caches, though a warm block was free."""
    pool = Pool(8, 4)
    blocks = taken(pool, 5)
    for index in (1, 3, 0):
        pool.decref(blocks[index])
    expected = [blocks[0], blocks[3], blocks[1]]
    equal(taken(pool, 3), expected, f"next after {expected[::-1]} were freed in this order")


def case_cached_oldest_first(Pool: PoolClass) -> None:
    """Of cached blocks, the one freed first is handed out first. Otherwise: the prompt of a moment
    ago is evicted and last hour's is kept."""
    pool = Pool(4, 4)
    blocks = cached(pool, 3)
    equal(taken(pool, 3), blocks, f"next after the cached blocks {blocks} were freed in this order")


def case_cached_go_last(Pool: PoolClass) -> None:
    """No cached block is handed out while there is one without known content. Otherwise: something
    that will be asked for again is lost for nothing."""
    pool = Pool(7, 4)
    known = cached(pool, 2)  # next to four that were never used
    used = [block for block in taken(pool, 4) if block not in known]
    equal(len(used), 4, f"blocks handed out before the cached {known}, of the 4 that could be")
    pool.decref(used[0])
    equal(pool.allocate(), used[0], f"next, with {used[0]} freed after the cached {known}")


def case_hit_is_a_use(Pool: PoolClass) -> None:
    """A cached block that is taken back and freed again becomes the last to go. Otherwise: the
    system prompt that all requests share is evicted, because it was there first."""
    pool = Pool(4, 4)
    first, second, third = cached(pool, 3)
    pool.incref(first)
    pool.decref(first)
    expected = [second, third, first]
    equal(taken(pool, 3), expected, f"next after a hit on {first} of {sorted(expected)}")


def case_free_blocks(Pool: PoolClass) -> None:
    """`free_blocks` gives what `allocate` would hand out, in this order, and takes nothing.
    Otherwise: a drawing shows another pool, and a cache is checked against an order of eviction
    that isn't this one."""
    pool = Pool(10, 4)
    used = taken(pool, 4)
    known = cached(pool, 3)  # next to two that were never used
    pool.decref(used[2])
    pool.decref(used[0])
    pool.incref(known[1])
    before = pool_state(pool)
    said = list(pool.free_blocks())
    equal(said[:2], [used[0], used[2]], f"the first of {said}, with these freed last")
    equal(list(pool.free_blocks()), said, "free_blocks asked again")
    equal(pool_state(pool), before, "the pool after both")
    equal(taken(pool, 6), said, "what is handed out after it")
    equal(list(pool.free_blocks()), [], "free_blocks with none free")


# -- cached blocks ------------------------------------------------------------------------------


def case_cached_flag(Pool: PoolClass) -> None:
    """A block is cached from `mark_cached` on, used or free, and only that block. Otherwise: a
    table writes into a block that others will find, or copies one that nobody can."""
    pool = Pool(4, 4)
    block, other = taken(pool, 2)
    before = pool_state(pool)
    equal(bool(pool.is_cached(block)), False, "is_cached of a new block")
    pool.mark_cached(block)
    equal(pool_state(pool), before | {"cached": [block]}, f"the pool after mark_cached({block})")
    pool.decref(block)
    equal(bool(pool.is_cached(block)), True, f"is_cached of block {block} once it is free")
    equal(bool(pool.is_cached(other)), False, f"is_cached of block {other}, never marked")


def case_marks_refused(Pool: PoolClass) -> None:
    """To mark a free block, or to unmark one that isn't cached, is refused and changes nothing.
    Otherwise: a cache knows a text in a block that is about to hold another, or forgets the wrong
    one."""
    pool = Pool(4, 4)
    used, freed = taken(pool, 2)
    pool.decref(freed)
    pool_refuses(pool, f"mark_cached({freed}), a free block", pool.mark_cached, freed)
    for block, state in ((freed, "free"), (used, "used")):
        what = f"unmark_cached({block}), a {state} block that isn't cached"
        pool_refuses(pool, what, pool.unmark_cached, block)


def case_taken_back(Pool: PoolClass) -> None:
    """`incref` of a free cached block takes it out of the free ones, wherever it stands among them.
    Otherwise: a prefix hit reads a block while somebody else is handed it."""
    for index in range(3):
        pool = Pool(4, 4)
        blocks = cached(pool, 3)
        block = blocks.pop(index)
        pool.incref(block)
        what = f"block {block}, taken back as number {index + 1} of 3 free ones"
        equal((pool.ref_count(block), pool.num_free), (1, 2), f"{what}: (owners, num_free)")
        equal(bool(pool.is_cached(block)), True, f"{what}: is_cached")
        equal(taken(pool, 3), [*blocks, INVALID_BLOCK], f"{what}: what is handed out then")


def case_eviction_told(Pool: PoolClass) -> None:
    """`on_evict` hears of each cached block once, by the time it is handed out, and of no other.
    Otherwise: the prefix cache finds a text in a block that holds another by now."""
    pool = Pool(5, 4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    hit, *known = cached(pool, 3)
    pool.incref(hit)
    pool.allocate()
    equal(evicted, [], "evicted before a cached block was handed out")
    for count in (1, 2):
        pool.allocate()
        equal(evicted, known[:count], f"evicted after {count} cached blocks were handed out")
    for block in known:
        pool.decref(block)
    taken(pool, 3)
    equal(evicted, known, "evicted after the same blocks were handed out again")


def case_eviction_forgets(Pool: PoolClass) -> None:
    """A cached block that is handed out isn't cached any more. Otherwise: its new owner copies it
    before every write, and a block of no use to anybody is kept as the last to go."""
    pool = Pool(3, 4)
    block, _ = cached(pool, 2)
    equal(pool.allocate(), block, "the block that is handed out")
    equal(bool(pool.is_cached(block)), False, "is_cached of it")
    pool.decref(block)
    equal(pool.allocate(), block, "next, after it was freed once more")


def case_forgotten(Pool: PoolClass) -> None:
    """After `unmark_cached` a used block is one like any other, and a free one is handed out next;
    nothing is evicted. Otherwise: a cleared cache leaves blocks behind that are kept for nobody."""
    pool = Pool(6, 4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    used, waiting = taken(pool, 2)
    pool.mark_cached(used)
    known = cached(pool, 3)
    free = known[1]
    before = pool_state(pool)
    pool.unmark_cached(used)
    pool.unmark_cached(free)
    rest = sorted(set(known) - {free})
    equal(
        pool_state(pool),
        before | {"cached": rest},
        f"the pool after {used} and {free} were unmarked",
    )
    pool.decref(used)
    equal(taken(pool, 2), [used, free], f"next, with {free} unmarked and then {used} freed")
    equal(evicted, [], "evicted by all this")
    pool.decref(waiting)
    equal(pool.allocate(), waiting, f"next, after block {waiting} was freed")


# -- all of it ----------------------------------------------------------------------------------


def case_random_trace(Pool: PoolClass) -> None:
    """Over 3,000 random calls a pool says and hands out what a plain list would. Otherwise: some
    order of calls that no rule thought of loses a block, and a week later the engine stops."""
    trace_of_pool(Pool)
