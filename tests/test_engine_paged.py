"""The loop on blocks: the same tokens as without, whatever was found, and nothing kept."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_decoder import VOCABULARY, tiny_decoder

from mie.engine import paged
from mie.engine.paged import KVMemory, greedy_paged
from mie.engine.plain import greedy_with_cache, greedy_without_cache
from mie.errors import OutOfBlocksError
from mie.execution.contiguous_cache import ContiguousCache
from mie.memory.block_pool import blocks_needed
from mie.memory.prefix_cache import HashPrefixCache, NoPrefixCache
from mie.memory.radix_tree import RadixTree
from mie.model.decoder import Decoder
from mie.model.kv_cache import NoCache

KINDS = {"hash": HashPrefixCache, "radix": RadixTree, "none": NoPrefixCache}
NAN = float("nan")
STORY = torch.randint(VOCABULARY, (60,), generator=torch.Generator().manual_seed(7)).tolist()


def decoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    return tiny_decoder(seed=seed, dtype=dtype)


@cache
@torch.inference_mode()
def definition(seed: int, prompt: tuple[int, ...], count: int) -> tuple[list[int], float]:
    """The tokens after ``prompt`` by the definition, and the smallest lead that one had."""
    model, tokens, lead = decoder(seed), list(prompt), float("inf")
    for _ in range(count):
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache())
        scores, best = model.logits(hidden[-1]).topk(2)
        lead = min(lead, float(scores[0] - scores[1]))
        tokens.append(int(best[0]))
    return tokens[len(prompt) :], lead


def memory(
    num_blocks: int,
    block_size: int,
    kind: str = "hash",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> KVMemory:
    """All slots NaN: what is read before it was written shows."""
    made = KVMemory(decoder(seed, dtype), num_blocks, block_size, prefix_cache=KINDS[kind])
    made.cache.kv_L2NBGD.fill_(NAN)
    return made


def answer(where: KVMemory, prompt, count: int, salt: str = "", seed: int = 0):
    """``count`` tokens, and how many of the prompt were found; then everything must be back."""
    with where.table(prompt, salt) as table:
        found = table.num_tokens
        tokens = list(islice(greedy_paged(decoder(seed), where, table, prompt, salt), count))
        assert table.num_tokens == len(prompt) + count - 1
    whole(where)
    return tokens, found


def whole(where: KVMemory) -> None:
    where.pool.check([])
    assert where.pool.num_used == 0 and len(where.copies) == 0
    if not isinstance(where.prefix_cache, NoPrefixCache):
        where.prefix_cache.check()


@pytest.fixture
def computed(monkeypatch):
    """Every token that is put through the model, as (position, token), step by step."""
    steps = []

    def counting(model, token_ids, position, kv_cache):
        steps.append(list(enumerate(token_ids, start=position)))
        return original(model, token_ids, position, kv_cache)

    original = paged.next_token
    monkeypatch.setattr(paged, "next_token", counting)
    return steps


# -- the same tokens ----------------------------------------------------------------------------


@given(
    seed=st.integers(0, 4),
    kind=st.sampled_from(sorted(KINDS)),
    block_size=st.integers(1, 16),
    spare=st.integers(0, 6),
    requests=st.lists(
        st.tuples(
            st.integers(0, 40),  # tokens of a common beginning
            st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),  # and own ones
            st.integers(1, 5),  # of the answer
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_S27_cold_or_warm_any_requests_in_any_order_get_the_tokens_of_the_definition(
    seed, kind, block_size, spare, requests
):
    prompts = [((*STORY[:common], *own), count) for common, own, count in requests]
    needed = max(blocks_needed(len(prompt) + count - 1, block_size) for prompt, count in prompts)
    where = memory(1 + needed + spare, block_size, kind, seed)
    for prompt, count in prompts + prompts[::-1]:
        expected, lead = definition(seed, prompt, count)
        assume(lead > 1e-4)  # else the order of a sum may decide
        tokens, found = answer(where, prompt, count, seed=seed)
        assert tokens == expected
        assert found % block_size == 0 and found < len(prompt)
        assert found == 0 or kind != "none"


@torch.inference_mode()
def logits_of_the_rest(where: KVMemory, seed: int, tokens: list[int]) -> torch.Tensor:
    """Logits in bfloat16 after each of ``tokens`` that was not found, in float32."""
    model = decoder(seed, torch.bfloat16)
    with where.table(tokens) as table:
        found = table.num_tokens
        step = where.step(table, len(tokens) - found)
        positions = torch.arange(found, len(tokens))
        logits = model.logits(model(torch.tensor(tokens[found:]), positions, step)).float()
        where.prefix_cache.insert(table, tokens, len(tokens))
    whole(where)
    return logits


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_S27_in_bfloat16_a_hit_moves_no_log_probability_further_than_rounding_may(
    kind, block_size, seed
):
    """Cold and warm are two computations of one text, in steps of other sizes. The logits of each
    are off by at most 3 · u · √n of the largest one, as test_decoder.py derives, for u = 2⁻⁸ and
    n = 11 roundings a layer and two more. Independent errors of two make √2 of that. And a
    log-probability is a logit less the logarithm of a sum, each off by at most as much: twice that.

    A wrong hit is out of these bounds: the same tokens after another beginning are.
    """
    where = memory(80, block_size, kind, seed, torch.bfloat16)
    cold = logits_of_the_rest(where, seed, STORY)
    warm = logits_of_the_rest(where, seed, STORY)
    assert len(cold) == len(STORY) and len(warm) == len(STORY) - 59 // block_size * block_size
    tolerance = 2 * 2**0.5 * 3 * 2**-8 * (2 * 11 + 2) ** 0.5 * float(cold.abs().max())
    rest = slice(len(STORY) - len(warm), None)
    cold_logp, warm_logp = (each.log_softmax(-1) for each in (cold[rest], warm))
    assert (cold_logp - warm_logp).abs().max() < tolerance

    begun_otherwise = [*STORY[1:17], *STORY[16:]]
    other = logits_of_the_rest(where, seed, begun_otherwise)[rest]
    assert (cold_logp - other.log_softmax(-1)).abs().max() > tolerance


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_three_loops_one_text(kind, block_size):
    prompt, model = STORY[:21], decoder()
    contiguous = ContiguousCache.for_decoder(model, 40)
    without = list(islice(greedy_without_cache(model, prompt), 12))
    assert list(islice(greedy_with_cache(model, prompt, contiguous), 12)) == without
    where = memory(40, block_size, kind)
    assert answer(where, prompt, 12)[0] == answer(where, prompt, 12)[0] == without
    assert len({*without}) > 3, "an answer that says nothing tests nothing"


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_S25_S17_prompts_around_a_full_block_compute_at_least_their_last_token(
    kind, blocks, off, computed
):
    """A second time all full blocks are found, but never the block of the last token."""
    size = 4
    prompt = STORY[: blocks * size + off]
    where = memory(10, size, kind)
    expected, found = answer(where, prompt, 6)
    assert found == 0 and expected == definition(0, tuple(prompt), 6)[0]
    computed.clear()
    assert answer(where, prompt, 6) == (expected, (len(prompt) - 1) // size * size)
    assert computed[0] == list(enumerate(prompt))[(len(prompt) - 1) // size * size :]
    assert len(computed[0]) >= 1 and [len(step) for step in computed[1:]] == [1] * 5


def test_a_prompt_that_is_cached_whole_is_still_answered(computed):
    """S17: the answer to the first registers the block that the longer second one ends with."""
    where = memory(12, 4)
    tokens, _ = answer(where, STORY[:6], 8)
    whole_prompt = [*STORY[:6], *tokens[:6]]  # 12 tokens, 13 of the first text were computed
    computed.clear()
    assert answer(where, whole_prompt, 2) == (tokens[6:], 8)
    assert [len(step) for step in computed] == [4, 1]


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(computed):
    size = 4
    where = memory(32, size)
    said: list[int] = []
    for turn in range(4):
        known = len(said) - 1 if said else 0  # the last token of an answer was never computed
        said += STORY[10 * turn : 10 * turn + 7]
        computed.clear()
        tokens, found = answer(where, said, 5)
        assert found == known // size * size
        assert sum(map(len, computed)) == len(said) - found + 4
        assert tokens == definition(0, tuple(said), 5)[0]
        said += tokens
    hits = where.prefix_cache.hits
    assert (hits.queried, hits.hit) == (7 + 19 + 31 + 43, 0 + 8 + 20 + 32)


# -- what is registered, and for whom -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_the_last_token_of_an_answer_is_in_no_block(kind):
    """It fills the block, but its K and V were never written: they are NaN here."""
    where = memory(10, 4, kind)
    tokens, _ = answer(where, STORY[:6], 2)  # six and two tokens fill two blocks; one is missing
    longer = [*STORY[:6], *tokens, 1]
    assert answer(where, longer, 3) == (definition(0, tuple(longer), 3)[0], 4)


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_texts_of_different_salts_share_nothing(kind):
    where, prompt = memory(20, 4, kind), STORY[:13]
    expected, _ = answer(where, prompt, 3, salt="a")
    for salt, found in [("b", 0), ("", 0), ("a", 12), ("b", 12), ("", 12)]:
        assert answer(where, prompt, 3, salt) == (expected, found)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_two_answers_in_turns_share_the_pool_and_the_beginning(kind):
    prompts = [STORY[:9], STORY[:10], STORY[:9]]
    where, model = memory(20, 4, kind), decoder()
    tables = [where.table(prompt) for prompt in prompts]  # all before any block is known
    loops = [
        greedy_paged(model, where, table, prompt)
        for table, prompt in zip(tables, prompts, strict=True)
    ]
    answers = [[next(loop) for loop in loops] for _ in range(7)]
    where.pool.check(table.blocks for table in tables)
    for prompt, tokens in zip(prompts, zip(*answers, strict=True), strict=True):
        assert list(tokens) == definition(0, tuple(prompt), 7)[0]
    if kind != "none":  # who computed a block second has changed over to the first one's
        assert tables[0].blocks[:2] == tables[1].blocks[:2] == tables[2].blocks[:2]
    for table in tables:
        table.release()
    whole(where)


def test_a_fork_goes_on_alone():
    """Its first token goes into a copy of the block that both share."""
    where, model, prompt = memory(20, 4), decoder(), STORY[:6]
    with where.table(prompt) as table:
        loop = greedy_paged(model, where, table, prompt)
        first = next(loop)
        with table.fork() as twin:
            other = [*prompt, (first + 1) % VOCABULARY]
            loops = loop, greedy_paged(model, where, twin, other)
            answers = [[next(loop) for loop in loops] for _ in range(5)]
            where.pool.check([table.blocks, twin.blocks])
    mine, theirs = map(list, zip(*answers, strict=True))
    assert [first, *mine] == definition(0, tuple(prompt), 6)[0]
    assert theirs == definition(0, tuple(other), 5)[0]
    whole(where)


def test_a_copy_that_fails_leaves_a_memory_that_works(monkeypatch):
    """The step is given up, and nothing waits for it: its blocks can go back."""
    where, model, prompt = memory(20, 4), decoder(), STORY[:6]
    with where.table(prompt) as table:
        loop = greedy_paged(model, where, table, prompt)
        tokens = [next(loop)]
        other = [*prompt, (tokens[0] + 1) % VOCABULARY]
        asked = []

        def fails(copies):
            asked.extend(copies)
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="is gone"):
            patch.setattr(where.cache, "copy_blocks", fails)
            with table.fork() as twin:
                next(greedy_paged(model, where, twin, other))
        assert [copy.source for copy in asked] == table.blocks[1:], "a copy had to be made"
        where.pool.check([table.blocks])
        assert len(where.copies) == 0 and not where.copies.is_launching
        with table.fork() as twin:
            again = list(islice(greedy_paged(model, where, twin, other), 5))
        tokens += islice(loop, 5)
    assert again == definition(0, tuple(other), 5)[0]
    assert tokens == definition(0, tuple(prompt), 6)[0]
    whole(where)


# -- the end of memory --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_the_smallest_pool_that_holds_an_answer(kind, block_size):
    prompt, count = STORY[:11], 6
    blocks = blocks_needed(len(prompt) + count - 1, block_size)
    where = memory(1 + blocks, block_size, kind)
    for _ in range(2):
        assert answer(where, prompt, count)[0] == definition(0, tuple(prompt), count)[0]
    with where.table(prompt) as table:
        loop = greedy_paged(decoder(), where, table, prompt)
        got = []
        with pytest.raises(OutOfBlocksError) as error:
            for token in loop:
                got.append(token)
        assert len(table.blocks) == blocks and len(got) == blocks * block_size - len(prompt) + 1
        assert f"to add: 1; blocks of {block_size} needed: 1, free: 0 of {blocks}" in str(
            error.value
        )
        assert error.value.http_status == 503
    whole(where)


def test_a_prompt_that_does_not_fit_beside_another_changes_nothing():
    where, model = memory(6, 4), decoder()
    with where.table(STORY[:12]) as first:
        loop = greedy_paged(model, where, first, STORY[:12])
        tokens = [next(loop)]
        with (
            where.table(STORY[20:32]) as second,
            pytest.raises(
                OutOfBlocksError, match="to add: 12; blocks of 4 needed: 3, free: 2 of 5"
            ),
        ):
            next(greedy_paged(model, where, second, STORY[20:32]))
        where.pool.check([first.blocks])
        tokens += islice(loop, 5)
    assert tokens == definition(0, tuple(STORY[:12]), 6)[0]
    whole(where)
