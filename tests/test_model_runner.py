"""A plan carried out on a real decoder: flat tensors, blocks moved in order, tokens chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_decoder import tiny_decoder

from mie.execution.batch import Batch
from mie.execution.kv_cache import PagedKVCache
from mie.execution.model_runner import ModelRunner
from mie.memory.block_copies import BlockCopy
from mie.memory.swap import SwapIn, SwapOut
from mie.model.kv_cache import NoCache
from mie.sampling.sampler import sample
from mie.sampling_params import Draw
from mie.scheduling.plan import ScheduledSequence, StepPlan, StepResult

NAN = float("nan")
SIZE = 4
CPU = torch.device("cpu")
GREEDY = Draw(0.0, 0, 0, 0)


def part(number: int, tokens, blocks, position: int = 0, draws=()) -> ScheduledSequence:
    """Sequence ``number`` computes ``tokens``, the first of them at ``position``."""
    name = f"s{number}"
    return ScheduledSequence(
        number, name, "prefill", tuple(tokens), position, tuple(blocks), SIZE, tuple(draws)
    )


def plan(*scheduled: ScheduledSequence, **more) -> StepPlan:
    return StepPlan(1, 99, tuple(scheduled), **more)


@pytest.fixture
def runner() -> ModelRunner:
    cache = PagedKVCache.for_decoder(tiny_decoder(), num_blocks=12, block_size=SIZE)
    cache.kv_L2NBGD.fill_(NAN)
    made = ModelRunner(tiny_decoder(), cache, num_host_blocks=4)
    made.swap_space.kv_L2NBGD.fill_(NAN)
    return made


@torch.inference_mode()
def logits_after(tokens) -> torch.Tensor:
    """Of the whole text at once, without any memory."""
    ids = torch.tensor(tokens)
    hidden_TE = tiny_decoder()(ids, torch.arange(len(ids)), NoCache())
    return tiny_decoder().logits(hidden_TE[-1:])


def greedy_after(tokens) -> int:
    return int(logits_after(tokens).argmax())


def test_a_mixed_plan_becomes_flat_tensors():
    """Two decodes, a chunk that is not the last, and a complete prompt with two answers."""
    mixed = plan(
        part(1, [7], [3, 5], 6, [GREEDY]),
        part(2, [8, 9, 10], [4], 0),
        part(3, [2], [6], 1, [Draw(1.0, 5, 2, 0)]),
        part(4, [11, 12], [9, 8], 3, [Draw(0.5, 1, 5, 0), Draw(0.5, 1, 5, 1)]),
        num_padding=2,
    )
    batch = Batch.of(mixed, CPU)
    assert batch.token_ids_T.tolist() == [7, 8, 9, 10, 2, 11, 12, 0, 0]
    assert batch.positions_T.tolist() == [6, 0, 1, 2, 1, 3, 4, 0, 0]
    assert batch.sampled_rows_S.tolist() == [0, 4, 6]
    assert [draw.index for draw in batch.draws] == [0, 0, 0, 1] and batch.num_draws == [1, 1, 2]
    assert [each.num_tokens for each in batch.sequences] == [7, 3, 2, 5]
    assert [tuple(each.slots) for each in batch.sequences] == [(22,), (16, 17, 18), (25,), (39, 32)]


def test_a_plan_without_draws_has_no_rows_to_choose_from(runner):
    batch = Batch.of(plan(part(1, [7, 8], [3])), CPU)
    assert batch.sampled_rows_S.tolist() == [] and batch.sampled_rows_S.dtype == torch.int64
    assert runner.run(plan(part(1, [7, 8], [3]))) == StepResult()


def test_sequences_of_one_step_do_not_see_each_other(runner):
    """Chunks of a prompt beside a decode and padding: each token is that of its text alone."""
    a, b, c = [1, 2, 3, 4, 5, 6], [6, 5, 4], [9] * 9
    first = runner.run(plan(part(1, a[:4], [3]), part(2, b, [7], 0, [GREEDY])))
    assert first.tokens == {2: (greedy_after(b),)}
    b.append(first.tokens[2][0])
    second = runner.run(
        plan(
            part(3, c, [1, 2, 8], 0, [GREEDY]),
            part(2, b[3:], [7], 3, [GREEDY]),
            part(1, a[4:], [3, 5], 4, [GREEDY]),
            num_padding=3,
        )
    )
    assert second.tokens == {3: (greedy_after(c),), 2: (greedy_after(b),), 1: (greedy_after(a),)}


def test_several_draws_are_made_from_one_row(runner):
    text = [3, 1, 4, 1, 5]
    draws = [Draw(1.0, 2, 5, index) for index in range(6)]
    result = runner.run(plan(part(1, text, [4, 2], 0, draws), part(2, [7], [9], 0, [GREEDY])))
    assert result.tokens[1] == tuple(sample(logits_after(text).expand(6, -1), draws))
    assert result.tokens[2] == (greedy_after([7]),) and len({*result.tokens[1]}) > 1


def test_blocks_move_out_then_are_copied_then_move_in(runner):
    """b leaves a block that a copy of a goes to, and c comes into the block that it was copied
    from: only in this order does everybody get what they should."""
    a, b, c = [1, 2, 3, 4, 5], [6, 7, 8, 9, 1], [8, 8, 8, 2, 1]
    runner.run(plan(part(1, a[:4], [1]), part(2, b[:4], [4]), part(3, c[:4], [3])))
    runner.run(plan(swap_out=(SwapOut(3, 0),)))
    result = runner.run(
        plan(
            part(1, a[4:], [4, 6], 4, [GREEDY]),
            part(3, c[4:], [1, 7], 4, [GREEDY]),
            swap_out=(SwapOut(4, 2),),
            copies=(BlockCopy(1, 4),),
            swap_in=(SwapIn(0, 1),),
        )
    )
    assert result.tokens == {1: (greedy_after(a),), 3: (greedy_after(c),)}
    back = plan(part(2, b[4:], [9, 8], 4, [GREEDY]), swap_in=(SwapIn(2, 9),))
    assert runner.run(back).tokens == {2: (greedy_after(b),)}


def test_a_plan_that_only_moves_blocks_computes_nothing(runner):
    runner.decoder = None
    assert runner.run(plan(swap_out=(SwapOut(1, 0),), copies=(BlockCopy(2, 3),))) == StepResult()


def test_the_runner_remembers_nothing_but_bytes(runner):
    """A plan that is carried out twice gives the same twice."""
    once = plan(part(1, [1, 2, 3], [5], 0, [GREEDY]))
    assert runner.run(once) == runner.run(once) == runner.run(replace(once, number=7))


def test_who_chooses_can_be_replaced():
    cache = PagedKVCache.for_decoder(tiny_decoder(), num_blocks=4, block_size=SIZE)
    seen = []

    def last(logits_SV, draws):
        seen.append((tuple(logits_SV.shape), draws))
        return [30] * len(draws)

    runner = ModelRunner(tiny_decoder(), cache, sample=last)
    result = runner.run(plan(part(1, [1, 2], [1], 0, [GREEDY]), part(2, [4], [2])))
    assert result.tokens == {1: (30,)} and seen == [((1, 31), [GREEDY])]
