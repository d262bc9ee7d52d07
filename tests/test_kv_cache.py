"""K and V in blocks: whatever the table, exactly what the contiguous cache remembers.

Bit for bit, in float32: the same numbers reach the same attention in the same shape, wherever they
lay. Every slot that nothing was written to is NaN, the scratch block too, so a single one that is
read shows in the result.
"""

from __future__ import annotations

import pytest
import torch
from cache_shape import LAYERS, D, G, H, config
from hypothesis import given
from hypothesis import strategies as st

from mie.execution.contiguous_cache import ContiguousCache
from mie.execution.kv_cache import PagedKVCache, SequenceStep
from mie.memory.block_copies import BlockCopies, BlockCopy
from mie.memory.block_pool import BlockPool, blocks_needed
from mie.memory.block_table import BlockTable
from mie.model.decoder import Decoder
from mie.ops import reference
from mie.ops.dispatch import Ops, for_device

SCALE = 0.5
NAN = float("nan")


def poisoned(num_blocks: int, block_size: int, ops: Ops | None = None) -> PagedKVCache:
    cache = PagedKVCache(config(), num_blocks, block_size, ops=ops)
    cache.kv_L2NBGD.fill_(NAN)
    return cache


class Text:
    """q, k and v of a text in each layer, its table, and the contiguous cache it must equal."""

    def __init__(self, length: int, seed: int, blocks: list[int]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers = [
            tuple(torch.randn(length, heads, D, generator=generator) for heads in (H, G, G))
            for _ in range(LAYERS)
        ]
        self.length = length
        self.blocks = blocks
        self.cache = ContiguousCache(config(), length)

    def new(self, layer: int, count: int):
        now = slice(self.cache.length, self.cache.length + count)
        return [part[now] for part in self.layers[layer]]

    def sequence_step(self, count: int, block_size: int) -> SequenceStep:
        end = self.cache.length + count
        slots = [
            self.blocks[position // block_size] * block_size + position % block_size
            for position in range(self.cache.length, end)
        ]
        return SequenceStep(self.blocks[: blocks_needed(end, block_size)], slots, end)


def run_step(paged: PagedKVCache, batch: list[tuple[Text, int]]) -> None:
    """Some new tokens of each text, in one step on blocks and each alone in its own cache."""
    step = paged.step([text.sequence_step(count, paged.block_size) for text, count in batch])
    for layer in range(LAYERS):
        rows = [text.new(layer, count) for text, count in batch]
        q, k, v = (torch.cat(part) for part in zip(*rows, strict=True))
        expected = [
            text.cache.attend(layer, *row, SCALE)
            for (text, _), row in zip(batch, rows, strict=True)
        ]
        assert torch.equal(step.attend(layer, q, k, v, SCALE), torch.cat(expected))
    for text, count in batch:
        text.cache.advance(count)


@given(data=st.data(), block_size=st.integers(1, 16), seed=st.integers(0, 999))
def test_any_tables_any_steps_any_batches_equal_contiguous_caches_bit_for_bit(
    data, block_size, seed
):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "lengths")
    needed = [blocks_needed(length, block_size) for length in lengths]
    num_blocks = 1 + sum(needed) + data.draw(st.integers(0, 3), "spare blocks")
    generator = torch.Generator().manual_seed(seed)
    shuffled = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    paged = poisoned(num_blocks, block_size)
    texts = []
    for index, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        texts.append(Text(length, seed + index, [shuffled.pop() for _ in range(count)]))
    while waiting := [text for text in texts if text.cache.length < text.length]:
        chosen = data.draw(st.permutations(waiting), "order")
        chosen = chosen[: data.draw(st.integers(1, len(chosen)), "sequences in the step")]
        batch = [
            (text, data.draw(st.integers(1, text.length - text.cache.length), "new tokens"))
            for text in chosen
        ]
        run_step(paged, batch)
    assert paged.kv_L2NBGD[:, :, 0].isnan().all(), "something was written into scratch"
    written = (~paged.kv_L2NBGD.isnan()).sum().item()
    assert written == LAYERS * 2 * G * D * sum(lengths)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("blocks", [2, 3, 4])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_S25_around_a_full_last_block(block_size, blocks, off):
    """The prompt ends one before, at and one behind the end of a block; three decodes follow."""
    length = blocks * block_size + off
    used = blocks_needed(length + 3, block_size)
    text = Text(length + 3, seed=length, blocks=list(range(used, 0, -1)))
    paged = poisoned(used + 1, block_size)
    run_step(paged, [(text, length)])
    for _ in range(3):
        run_step(paged, [(text, 1)])


def test_several_sequences_read_one_block():
    """What prefix sharing is: the same physical block in two lists, written once."""
    first, second = Text(6, seed=1, blocks=[3, 1]), Text(6, seed=1, blocks=[3, 2])
    paged = poisoned(4, 4)
    run_step(paged, [(first, 4)])
    for layer in range(LAYERS):  # the second found them: only its oracle has to learn of them
        second.cache.attend(layer, *second.new(layer, 4), SCALE)
    second.cache.advance(4)
    run_step(paged, [(second, 2), (first, 1)])
    run_step(paged, [(first, 1)])


def test_its_memory_is_what_the_configuration_says_and_empty():
    cache = PagedKVCache(config(), 5, 8, torch.bfloat16)
    assert cache.nbytes == config().kv_bytes_per_token(torch.bfloat16) * 5 * 8
    assert cache.kv_L2NBGD.shape == (LAYERS, 2, 5, 8, G, D)
    assert not cache.kv_L2NBGD.any()


def test_the_decoders_own_attention_runs_on_what_was_gathered():
    calls = []

    def mine(q_THD, k_SGD, v_SGD, scale):
        calls.append((len(q_THD), len(k_SGD), len(v_SGD)))
        return reference.attention(q_THD, k_SGD, v_SGD, scale)

    decoder = Decoder(config(), torch.bfloat16, ops=Ops(attention=mine))
    cache = PagedKVCache.for_decoder(decoder, 4, 2)
    assert cache.kv_L2NBGD.dtype == torch.bfloat16
    step = cache.step([SequenceStep([2, 1], [2], 3), SequenceStep([3], [6, 7], 2)])
    q, k, v = (torch.zeros(3, heads, D, dtype=torch.bfloat16) for heads in (H, G, G))
    step.attend(0, q, k, v, SCALE)
    assert calls == [(1, 3, 3), (2, 2, 2)]


# -- padding, and decodes computed together -------------------------------------------------------


def qkv(tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, D, generator=generator) for heads in (H, G, G)]


@pytest.mark.parametrize("ops", [Ops(), for_device("cpu")], ids=["reference", "fused"])
@pytest.mark.parametrize("num_padding", [1, 3])
def test_padding_goes_to_scratch_sees_nothing_and_changes_nobody(ops, num_padding):
    sequences = [SequenceStep([2, 1], [2], 3), SequenceStep([3], [6, 7], 2)]
    results = []
    for padding in (0, num_padding):
        cache = poisoned(4, 2, ops)
        cache.kv_L2NBGD[:, :, 2] = 0.5  # the two tokens that came before
        for layer in range(LAYERS):
            q, k, v = (part[: 3 + padding] for part in qkv(3 + num_padding, seed=layer))
            out = cache.step(sequences, padding).attend(layer, q, k, v, SCALE)
        assert not out[3:].any() and len(out) == 3 + padding
        scratch = cache.kv_L2NBGD[:, :, 0]
        assert scratch[:, :, 0].isnan().all().item() == (padding == 0)
        assert scratch[:, :, 1].isnan().all(), "padding beyond slot 0"
        results.append((out[:3], cache.kv_L2NBGD[:, :, 1:].nan_to_num(7.0)))
    for without, padded in zip(*results, strict=True):
        assert torch.equal(without, padded)


@given(data=st.data(), block_size=st.sampled_from([1, 3, 16]), seed=st.integers(0, 999))
def test_decodes_and_chunks_in_any_order_equal_each_sequence_alone(data, block_size, seed):
    """With the fused operations, whose decodes leave the flat batch and come back to their rows."""
    before = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5), "context")
    new = [data.draw(st.sampled_from([1, 1, 1, 4]), "new tokens") for _ in before]
    padding = data.draw(st.integers(0, 2), "padding")
    spans = list(zip(before, new, strict=True))
    needed = [blocks_needed(old + more, block_size) for old, more in spans]
    free = list(range(sum(needed), 0, -1))
    texts = []
    for index, (old, more) in enumerate(spans):
        blocks = [free.pop() for _ in range(needed[index])]
        texts.append(Text(old + more, seed=seed + index, blocks=blocks))
    fused, plain = (
        poisoned(sum(needed) + 1, block_size, ops) for ops in (for_device("cpu"), Ops())
    )
    if started := [(text, old) for text, (old, _) in zip(texts, spans, strict=True) if old]:
        run_step(plain, started)
        fused.kv_L2NBGD.copy_(plain.kv_L2NBGD)
    sequences = [
        text.sequence_step(more, block_size) for text, more in zip(texts, new, strict=True)
    ]
    steps = [cache.step(sequences, padding) for cache in (fused, plain)]
    for layer in range(LAYERS):
        rows = [text.new(layer, more) for text, more in zip(texts, new, strict=True)]
        rows.append(qkv(padding, seed))
        q, k, v = (torch.cat(part) for part in zip(*rows, strict=True))
        got, expected = (step.attend(layer, q, k, v, SCALE) for step in steps)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_readers_attention_computes_every_sequence_of_a_fast_engine():
    calls = []

    def mine(q_THD, k_SGD, v_SGD, scale):
        calls.append((len(q_THD), len(k_SGD)))
        return reference.attention(q_THD, k_SGD, v_SGD, scale)

    cache = poisoned(4, 2, for_device("cpu", {"attention": mine}))
    step = cache.step([SequenceStep([1], [2], 1), SequenceStep([2], [4], 1)])
    step.attend(0, *qkv(2, seed=0), SCALE)
    assert calls == [(1, 1), (1, 1)]


# -- copies -------------------------------------------------------------------------------------


@given(data=st.data(), num_blocks=st.integers(2, 12), block_size=st.integers(1, 4))
def test_copies_equal_copying_one_after_another(data, num_blocks, block_size):
    cache = PagedKVCache(config(), num_blocks, block_size)
    cache.kv_L2NBGD.copy_(torch.randn(cache.kv_L2NBGD.shape))
    order = data.draw(st.permutations(range(num_blocks)))
    targets = order[: data.draw(st.integers(0, num_blocks - 1))]
    copies = [
        BlockCopy(data.draw(st.sampled_from(order[len(targets) :])), target) for target in targets
    ]
    expected = cache.kv_L2NBGD.clone()
    for source, target in copies:
        expected[:, :, target] = expected[:, :, source]
    cache.copy_blocks(copies)
    assert torch.equal(cache.kv_L2NBGD, expected)


@pytest.mark.parametrize("copies", [[(1, 2), (3, 2)], [(1, 2), (2, 3)], [(1, 1)]])
def test_copies_whose_order_would_matter_are_an_error_of_ours(copies):
    with pytest.raises(AssertionError):
        PagedKVCache(config(), 4).copy_blocks(copies)


@given(
    common=st.integers(1, 20),
    further=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    block_size=st.integers(1, 8),
    together=st.booleans(),
)
def test_S22_two_continuations_of_a_fork_equal_two_texts_of_their_own(
    common, further, block_size, together
):
    """The tables of the engine: fork, split on the first write, go on; in one step or in turns."""
    num_blocks = 1 + sum(blocks_needed(common + more, block_size) for more in further)
    pool = BlockPool(num_blocks, block_size)
    copies = BlockCopies(pool)
    paged = poisoned(num_blocks, block_size)
    texts = [Text(common + more, seed=index, blocks=[]) for index, more in enumerate(further)]
    for layer in range(LAYERS):  # the same beginning
        for mine, theirs in zip(texts[1].layers[layer], texts[0].layers[layer], strict=True):
            mine[:common] = theirs[:common]

    def grow(batch):
        for text, table, count in batch:
            assert table.append(count)
            text.blocks = table.blocks
        paged.copy_blocks(copies.take())
        copies.launched()
        run_step(paged, [(text, count) for text, _, count in batch])
        pool.check([*(table.blocks for table in tables), copies.pinned()])

    tables = [BlockTable(pool, copies)]
    grow([(texts[0], tables[0], common)])
    tables.append(tables[0].fork())
    for layer in range(LAYERS):  # only the oracle of the second has to compute it too
        texts[1].cache.attend(layer, *texts[1].new(layer, common), SCALE)
    texts[1].cache.advance(common)
    if together:
        grow([(texts[i], tables[i], 1) for i in (1, 0)])
    for text, table in zip(texts, tables, strict=True):
        while text.cache.length < text.length:
            grow([(text, table, 1)])
    for table in tables:
        table.release()
    pool.check([])


# -- what a step promises itself ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "computes something"),
        ([SequenceStep([1], [], 2)], "0 new tokens"),
        ([SequenceStep([1], [4, 5], 1)], "2 new tokens among 1"),
        ([SequenceStep([1], [7], 5)], "5 tokens in 4 slots"),
        ([SequenceStep([1, 2], [9], 5)], "position 4 in slot 9, not 8"),
        ([SequenceStep([1], [5], 2), SequenceStep([1], [5], 2)], "in one slot"),
    ],
)
def test_slots_and_lengths_that_disagree(sequences, message):
    with pytest.raises(AssertionError, match=message):
        PagedKVCache(config(), 3, 4).step(sequences)
