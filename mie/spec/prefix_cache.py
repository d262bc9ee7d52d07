"""What any prefix cache must do.

    cache = Cache(pool)                              puts itself into pool.on_evict
    cache.match(token_ids, salt)                     blocks of the longest known beginning, each
                                                     with one more owner, the caller
    cache.insert(table, token_ids, computed, salt)   the table's full blocks among its first
                                                     `computed` tokens are known from now on
    cache.clear()                                    nothing is known; False while any is in use
    cache.hits                                       a HitCounter, which the caller fills

Texts with different salts never share. Pool and tables are the engine's. ``Engine`` stands for the
rest: whatever it writes into a slot says the whole text up to there, as K and V do.
"""

from __future__ import annotations

import sys

from mie.spec.device import SIZE, CacheClass, Engine
from mie.spec.expect import equal
from mie.spec.traces import trace_of_cache

A, B, C, D, X = ([10 * n + i for i in range(SIZE)] for n in range(1, 6))  # a block of tokens each


# -- what is found ------------------------------------------------------------------------------


def case_longest_beginning(Cache: CacheClass) -> None:
    """`match` gives the blocks of the longest known beginning, in order, whole ones only.
    Otherwise: what is in memory is computed again, or half a block of another text is read."""
    engine = Engine(Cache)
    table = engine.known([*A, *B, *C])
    for text, count in (
        ([*A, *B, *C, *D], 3),
        ([*A, *B, *C[:2], *D], 2),
        ([*A, *B, *X, *C], 2),
        ([*A[:3], *X, *B], 0),
        ([*X, *A, *B], 0),
    ):
        got = engine.cache.match(text)
        equal(list(got), list(table.blocks)[:count], f"match of {text}, with {A + B + C} known")


def case_several_texts(Cache: CacheClass) -> None:
    """Texts that part somewhere are all found, each to its end. Otherwise: a second question about
    one document pushes the first one out."""
    engine = Engine(Cache)
    texts = ([*A, *B, *C], [*A, *B, *D], [*A, *X], [*D], [*A, *B, *C, *X, *A])
    tables = [engine.known(text) for text in texts]
    for text, table in zip(texts, tables, strict=True):
        equal(list(engine.cache.match([*text, -1])), list(table.blocks), f"match of {[*text, -1]}")


def case_never_the_whole_text(Cache: CacheClass) -> None:
    """A hit leaves at least one token to compute, though all are known. Otherwise: the step has no
    token of this sequence, and no logits come out to choose its next one from."""
    engine = Engine(Cache)
    engine.known([*A, *B, *C])
    for text, count in (([*A, *B], 1), ([*A, *B, C[0]], 2), (A, 0), (A[:1], 0), ([], 0)):
        equal(len(engine.cache.match(text)), count, f"blocks found of {text}, all of it known")


def case_after_the_same_beginning(Cache: CacheClass) -> None:
    """The same tokens after another beginning are no hit. Otherwise: K and V that were computed in
    one conversation are read in another, where they mean something else."""
    engine = Engine(Cache)
    engine.known([*A, *B, *C])
    engine.known([*X])
    for text, count in (([*X, *B, *C], 1), ([*B, *C], 0), ([*A, *C], 1), ([*A, *A], 1)):
        equal(engine.found(text), count, f"blocks found of {text}, with {A + B + C} and {X} known")


def case_equal_hashes(Cache: CacheClass) -> None:
    """Two texts whose hashes are equal are still two texts. Otherwise: whoever finds such a pair
    reads what another user has written."""
    twin = sys.hash_info.modulus  # Python's hash of this number is that of 0
    one, other = [0, 1, 2, 3, *B], [twin, 1, 2, 3, *B]
    engine = Engine(Cache)
    engine.known(one)
    equal(engine.found(other), 0, f"blocks found of {other}, with {one} known")
    engine.known(other)  # as a text of its own, or not at all: a hit that is missed is no harm
    engine.admitted([*other, -1])
    equal(engine.found(one), 2, f"blocks found of {one}, with {other} known as well")


def case_salt(Cache: CacheClass) -> None:
    """A text is found under the salt it was inserted with and no other. Otherwise: one customer can
    tell by the time of an answer what another has asked, or reads another adapter's K and V."""
    engine = Engine(Cache)
    for salt in ("", "red"):
        engine.known([*A, *B], salt)
        equal(
            engine.found([*A, *B], "blue"), 0, f"blocks found with salt 'blue', known as {salt!r}"
        )
    one, other = engine.admitted([*A, *B, -1]), engine.admitted([*A, *B, -1], "red")
    got = (len(one.blocks), len(other.blocks), len({*one.blocks, *other.blocks}))
    equal(got, (2, 2, 4), "(blocks found without a salt, with 'red', different ones)")


# -- what is known ------------------------------------------------------------------------------


def case_only_what_was_computed(Cache: CacheClass) -> None:
    """`insert` makes full blocks of the first `num_computed` tokens known, and the rest when it
    comes. Otherwise: a long prompt that is computed in pieces is read before it is there."""
    engine = Engine(Cache)
    text = [*A, *B, *C, *D]
    table = engine.admitted(text)
    table.append(len(text))  # slots for all, of which nothing has been written
    for computed, count in ((0, 0), (3, 0), (4, 1), (11, 2), (11, 2), (15, 3), (16, 4)):
        written = [(table, p, ("", *text[: p + 1])) for p in range(computed)]
        engine.device.step(written)
        engine.cache.insert(table, text, computed)
        equal(engine.found(text), count, f"blocks found, {computed} of {len(text)} computed")


def case_asking_teaches_nothing(Cache: CacheClass) -> None:
    """`match` makes nothing known. Otherwise: a second request with the same prompt in the same
    step reads blocks that the first has yet to write."""
    engine = Engine(Cache)
    before = engine.pool.num_free
    for attempt in (1, 2):
        got = engine.cache.match([*A, *B, *C])
        equal(list(got), [], f"match number {attempt} of a text that nobody computed")
    engine.known([*A])
    equal(engine.found([*A, *B]), 1, "blocks found of two, one of them known")
    equal(engine.found([*A, *B]), 1, "blocks found of two when asked again")
    equal(engine.pool.num_free, before - 1, "free blocks after all this")


def case_outlives_its_sequence(Cache: CacheClass) -> None:
    """A text stays known after its sequence has gone, in blocks that count as free. Otherwise: a
    conversation computes all of its turns at each one, or the pool fills up with the past."""
    engine = Engine(Cache)
    table = engine.known([*A, *B, *C])
    blocks = list(table.blocks)
    table.release()
    equal(engine.pool.num_free, 15, "free blocks of 15 once the only sequence is released")
    got = engine.admitted([*A, *B, *C, *D])
    equal(list(got.blocks), blocks, "blocks found of the released text")


def case_owned_at_once(Cache: CacheClass) -> None:
    """Each block that `match` gives has one more owner when it returns. Otherwise: the rest of the
    same prompt is written into the blocks of its own beginning."""
    engine = Engine(Cache)
    table = engine.known([*A, *B])
    table.release()
    for owners in (1, 2):
        found = engine.cache.match([*A, *B, *C])
        got = [engine.pool.ref_count(block) for block in found]
        equal(got, [owners] * 2, f"owners of the blocks found by match number {owners}")
    rest = [engine.pool.allocate() for _ in range(14)]
    both = sorted({*rest} & {*found})
    equal(both, [], f"blocks among {found}, just found, that were handed out to somebody else")


def case_one_copy(Cache: CacheClass) -> None:
    """Sequences that computed the same text side by side own the same blocks once it is inserted.
    Otherwise: each keeps its own, and some know a block without the one before it."""
    engine = Engine(Cache)
    text = [*A, *B, *C[:2]]
    tables = [engine.admitted(text) for _ in range(3)]
    for table in tables:
        engine.compute(table, text)
    for table in tables:
        engine.cache.insert(table, text, len(text))
    for table in tables[1:]:
        equal(list(table.blocks)[:2], list(tables[0].blocks)[:2], "full blocks of one text")
    engine.device.owned_by(*tables, what="after three sequences inserted one text")
    equal(engine.pool.num_free, 10, "free blocks of 15: 2 are shared, each has 1 of its own")


# -- what is evicted ----------------------------------------------------------------------------


def case_evicted_is_gone(Cache: CacheClass) -> None:
    """What stood in a block that is handed out again isn't found any more. Otherwise: a request
    reads another one's text, fluently."""
    engine = Engine(Cache, 4)
    engine.known([*A, *B, *C]).release()
    for evicted in (1, 2, 3):
        engine.evict(1)
        equal(engine.found([*A, *B, *C]), 3 - evicted, f"blocks found of 3, {evicted} evicted")
    engine.known([*X, *D]).release()
    equal(engine.found([*A, *B, *C]), 0, "blocks found of the old text in the new one's blocks")
    engine.known([*A, *B]).release()
    equal(engine.found([*A, *B, *C]), 2, "blocks found of the old text, computed again")


def case_ends_go_first(Cache: CacheClass) -> None:
    """The end of a text is evicted before its beginning, whoever was released first. Otherwise:
    blocks stay that can't be found, since what stands before them is gone."""
    for short_goes_first in (True, False):
        engine = Engine(Cache, 8)
        short, long = engine.admitted(A), engine.admitted([*A, *B, *C])
        engine.compute(short, A)
        engine.compute(long, [*A, *B, *C])
        engine.cache.insert(short, A, 4)
        engine.cache.insert(long, [*A, *B, *C], 12)
        for table in (short, long) if short_goes_first else (long, short):
            table.release()
        for left in (2, 1, 0):
            engine.evict(1)
            equal(engine.found([*A, *B, *C]), left, f"blocks found of 3 after {3 - left} evictions")


def case_beginning_evicted(Cache: CacheClass) -> None:
    """What continues an evicted block isn't found, though another text moves into that block.
    Otherwise: a cache that names texts by block numbers reads an old end after a new beginning."""
    engine = Engine(Cache, 8)
    text = [*A, *B]
    first, table = engine.admitted(A), engine.admitted(text)
    engine.compute(first, A)
    engine.compute(table, text)
    twin = table.fork()
    engine.cache.insert(first, A, len(A))
    engine.cache.insert(table, text, len(text))  # owns first's block now; the twin keeps its own
    beginning = table.blocks[0]
    for each in (first, table, twin):  # so the end is given back after the beginning
        each.release()
    handed_out = []
    while engine.pool.num_free and beginning not in handed_out:
        handed_out.append(engine.pool.allocate())
    equal(engine.found(text), 0, "blocks found of a text whose first one was evicted")
    for block in handed_out:
        engine.pool.decref(block)
    engine.known(X)  # in the block that was given back last
    equal(engine.found([*X, *B]), 1, "blocks found of a new beginning before the old end")


def case_oldest_use_first(Cache: CacheClass) -> None:
    """The text that hasn't been used for longest is evicted first, and a hit is a use. Otherwise:
    the system prompt of every request goes, and a question that was asked once stays."""
    engine = Engine(Cache, 4)
    for text in (A, B, C):
        engine.known(text).release()
    engine.admitted([*A, -1]).release()
    engine.cache.match([*X, *B])  # no hit, no use
    engine.evict(1)
    equal(engine.found([*A]), 1, "blocks found of the text used last, after one eviction")
    equal(engine.found([*C]), 1, "blocks found of the one before, after one eviction")
    equal(engine.found([*B]), 0, "blocks found of the one used first, after one eviction")


def case_clear(Cache: CacheClass) -> None:
    """`clear` forgets everything and says True; while a known block is in use it says False and
    forgets nothing. Otherwise: new weights go on with the K and V of the old ones."""
    engine = Engine(Cache)
    engine.known([*A, *B]).release()
    table = engine.known([*A, *C])
    equal(engine.cache.clear(), False, "clear with a known block in use")
    equal((engine.found([*A, *B]), engine.found([*A, *C])), (2, 2), "blocks found after it")
    table.release()
    equal(engine.cache.clear(), True, "clear with none in use")
    equal((engine.found([*A, *B]), engine.found([*A, *C])), (0, 0), "blocks found after it")
    cached = [block for block in range(16) if engine.pool.is_cached(block)]
    equal((cached, engine.pool.num_free), ([], 15), "(blocks still marked as cached, free blocks)")
    engine.known([*A, *B]).release()
    equal(engine.found([*A, *B]), 2, "blocks found of a text that was computed again")
    engine.evict(2)
    equal(engine.found([*A, *B]), 0, "blocks found of it after 2 evictions")


# -- tables that change -------------------------------------------------------------------------


def case_rewritten(Cache: CacheClass) -> None:
    """A table that was forked, cut and continued otherwise adds its new text and leaves the old one
    as it was. Otherwise: a rejected draft or another answer is found in place of the text."""
    engine = Engine(Cache)
    table = engine.known([*A, *B, *C])
    twin = table.fork()
    twin.truncate(SIZE + 2)
    text = [*A, *B[:2], *X[:2], *D]
    engine.compute(twin, text)
    engine.cache.insert(twin, text, len(text))
    table.truncate(2 * SIZE)
    other = [*A, *B, *X]
    engine.compute(table, other)
    engine.cache.insert(table, other, len(other))
    for said in ([*A, *B, *C], text, other):
        equal(engine.found(said), 3, f"blocks found of {said}")
    engine.holds(table, other)
    engine.holds(twin, text)
    engine.device.owned_by(table, twin, what="after it")


def case_counts_what_it_is_told(Cache: CacheClass) -> None:
    """`hits` begins at zero and counts what is added, not what is asked. Otherwise: a request that
    waits for memory and asks in every step makes the hit rate."""
    engine, other = Engine(Cache), Engine(Cache)
    engine.known([*A, *B]).release()
    engine.found([*A, *B])
    hits = engine.cache.hits
    equal((hits.queried, hits.hit, hits.rate), (0, 0, 0.0), "(queried, hit, rate) before any add")
    hits.add(10, 8)
    hits.add(10, 0)
    equal((hits.queried, hits.hit, hits.rate), (20, 8, 0.4), "(queried, hit, rate) after two adds")
    equal(other.cache.hits.queried, 0, "tokens queried of another cache")


# -- all of it ----------------------------------------------------------------------------------


def case_random_trace(Cache: CacheClass) -> None:
    """Over 1,000 random steps a cache finds what a list of all known beginnings would. Otherwise:
    some order of texts that no rule thought of finds the wrong one, or loses one for good."""
    trace_of_cache(Cache)
