"""Bugs that schedulers have had: one test for each, under its number, and its mutant.

Invariant: every test here fails on a scheduler without the rule that it is about. That is tested
too: ``support/scheduler_mutants.py`` drops one rule each, and the last tests watch the tests fail.

The numbers are those of the collection whose rows about memory are in ``test_known_bugs.py``. Here
are scheduling and admission (S1 to S11), and preemption (S12 to S15).

The device is ``support/fake_runner.py``, and ``support/engine_harness.py`` looks at the engine
after every step.
"""

from __future__ import annotations

import random
import re

import pytest
import scheduler_mutants as mutants
from engine_harness import Harness, engine
from fake_runner import alone

from mie.errors import ContextLengthError, RequestError
from mie.memory.prefix_cache import NoPrefixCache
from mie.request import FinishReason
from mie.scheduling.queue import FirstComeFirstServed, StrictPriority
from mie.scheduling.scheduler import Scheduler

UNCACHED = {"prefix_cache": NoPrefixCache}


def under_pressure(num_requests: int = 8, max_tokens: int = 14, **options) -> Harness:
    """Room for three of the requests at a time, once they have grown; nothing is found again."""
    settings = {"num_blocks": 15, "max_num_seqs": 8, "memory": UNCACHED} | options
    harness = engine(**settings)
    for number in range(num_requests):
        harness.ask(f"r{number}", 5 + number % 3, max_tokens)
    return harness


# -- admission -----------------------------------------------------------------------------------


def test_s01_alone_without_memory_it_ends_and_says_so(scheduler=Scheduler):
    """The only sequence could not grow: an assert fired, or it tried again for ever."""
    harness = engine(num_blocks=4, scheduler=scheduler)
    harness.ask("grows", 6, max_tokens=None)
    harness.ask("waits", 5, max_tokens=3)
    harness.drain(100)
    assert harness.ends == {
        ("grows", 0): FinishReason.KV_EXHAUSTED,
        ("waits", 0): FinishReason.LENGTH,
    }
    assert len(harness.answer("grows")) == 16 - 6 + 1, "all blocks are full, and one token more"
    harness.is_right()


def test_s01_it_ends_in_the_queue_as_well(scheduler=Scheduler):
    """A fork that was preempted with more tokens than the pool holds waited for ever."""
    harness = engine(num_blocks=4, scheduler=scheduler)
    harness.ask("twins", 16, max_tokens=None, n=2)
    harness.ask("waits", 5, max_tokens=3)
    harness.drain(100)
    assert harness.counts["preempted"] == 1
    assert harness.counts[FinishReason.KV_EXHAUSTED] == 2
    harness.is_right()


def test_s02_what_never_fits_is_refused_and_what_just_fits_is_served(scheduler=Scheduler):
    """A request larger than the pool stood at the head of the queue, and nobody came past it.
    Another engine was one off, and refused the one that fits exactly."""
    for prompt in (1, 3, 4, 5, 15):
        harness = engine(num_blocks=4, scheduler=scheduler)
        fits = 16 - prompt + 1  # the last token needs no slot
        with pytest.raises(ContextLengthError, match="needs 5 blocks of 4; the K/V memory has 4"):
            harness.ask("larger", prompt, fits + 1)
        harness.ask("fits", prompt, fits)
        harness.ask("after", 1, 1)
        harness.drain(100)
        assert len(harness.answer("fits")) == fits
        harness.is_right()


def test_s03_there_is_one_limit_of_length(scheduler=Scheduler):
    """Admission looked at one limit and the runner had another: it ran into the difference."""
    for prompt in range(1, 12):
        harness = engine(max_model_len=10, scheduler=scheduler)
        harness.fake.max_model_len = 10 - 1  # the last token is never computed
        try:
            harness.ask("all", prompt, max_tokens=None)
            harness.ask("more", prompt, max_tokens=100)
        except ContextLengthError:
            assert prompt >= 10
            continue
        harness.drain(50)
        assert prompt + len(harness.answer("all")) == 10 == prompt + len(harness.answer("more"))
        harness.is_right()


def test_s04_memory_is_counted_in_blocks(scheduler=Scheduler):
    """Slots were counted where whole blocks are taken: many short prompts, and no block for one."""
    harness = engine(
        num_blocks=5, block_size=16, max_num_seqs=12, token_budget=64, scheduler=scheduler
    )
    for number in range(12):
        harness.ask(f"r{number}", 1, 3)
    harness.drain(100)
    harness.is_right()


# -- who goes and who comes ----------------------------------------------------------------------


def test_s06_a_victim_of_this_step_is_unwound(scheduler=Scheduler):
    """A victim was scheduled already: its tokens stayed in the plan, or were taken off the budget.

    Blocks of one token: "low" takes the last one, "urgent" needs one, and throws "low" out of the
    plan that it is in. The prompt behind them gets its token too. (The harness looks at all plans:
    no victim is in one, and no budget is left while somebody has something to compute.)"""
    harness = engine(
        num_blocks=30,
        block_size=1,
        token_budget=4,
        scheduler=scheduler,
        queue=StrictPriority(),
        memory=UNCACHED,
    )
    harness.ask("low", 2, 20, priority=1)
    harness.step()
    harness.ask("urgent", 2, 20)
    harness.step()
    harness.ask("long", 20, 3)
    harness.drain()
    harness.is_right()
    (unwound, *_) = [repr(plan) for plan in harness.plans if plan.preempted]
    assert unwound == "step 9: 4 of 4 tokens: urgent[8] long[12:15], 1 preempted"


def test_s07_who_was_preempted_keeps_its_place(queue=FirstComeFirstServed):
    """It went to the back of the queue, and everybody overtook it."""
    harness = under_pressure(queue=queue())
    harness.drain()
    assert harness.counts["preempted"] > 0
    assert [name for name, _ in harness.ends] == sorted(harness.requests)
    harness.is_right()


def test_s07_nobody_comes_in_where_somebody_was_thrown_out(scheduler=Scheduler):
    """The blocks of a victim went to the next in the queue, and were missed in the next step."""
    preempted = 0
    for seed in range(40):
        dice = random.Random(seed)
        harness = engine(12, scheduler=scheduler, victim_policy=dice.choice, memory=UNCACHED)
        for number in range(8):
            harness.ask(f"r{number}", dice.randint(1, 12), dice.randint(1, 20))
        harness.drain()
        harness.is_right()
        running: set[str] = set()
        for plan in harness.plans:
            names = {scheduled.name for scheduled in plan.scheduled}
            assert not plan.preempted or names <= running, f"{plan} admits"
            running = names
        preempted += harness.counts["preempted"]
    assert preempted > 40


def test_s07_who_comes_in_can_stay(scheduler=Scheduler):
    """It came in on the last block, and went with the next one that somebody needed: 17 times for
    20 requests, and 7 times if everybody who runs keeps a block to grow into."""
    harness = under_pressure(20, scheduler=scheduler)
    harness.drain()
    assert 0 < harness.counts["preempted"] < 10
    harness.is_right()


def test_s08_equals_do_not_displace_each_other(queue=StrictPriority, scheduler=Scheduler):
    """With all seats taken, two requests of one priority threw each other out in turn."""
    harness = engine(max_num_seqs=2, queue=queue(), scheduler=scheduler)
    for number in range(6):
        harness.ask(f"r{number}", 3, 6, priority=1)
    harness.step()
    harness.ask("urgent", 3, 6, priority=0)
    harness.drain()
    assert harness.counts["preempted"] == 1, "the urgent one displaces one, and nobody else does"
    assert next(iter(harness.ends)) == ("r0", 0), "the last admitted went"
    harness.is_right()


def test_s09_what_is_computed_again_is_counted(scheduler=Scheduler):
    """Up to 79 % of the work was done twice, and no counter said so."""
    harness = under_pressure(scheduler=scheduler)
    harness.drain()
    counted = sum(record.num_recomputed for record in harness.core.trace.records)
    assert counted == harness.fake.num_recomputed > 0


def test_s09_the_default_victim_wastes_little(scheduler=Scheduler):
    """The choice of the victim decides how much is computed twice: by default, at most two thirds
    of what the worst choice costs."""
    by_default, at_worst = 0, 0
    for num_requests in (8, 12, 20):
        harness = under_pressure(num_requests, 30, scheduler=scheduler)
        harness.drain()
        by_default += harness.fake.num_recomputed
        harness = under_pressure(num_requests, 30, victim_policy=most_computed)
        harness.drain()
        at_worst += harness.fake.num_recomputed
    assert 0 < by_default < at_worst * 2 / 3, f"{by_default} tokens, {at_worst} at worst"


def most_computed(candidates):
    return max(candidates, key=lambda sequence: sequence.num_computed)


# -- no phases -----------------------------------------------------------------------------------


def test_s10_a_long_prompt_holds_nobody_up(scheduler=Scheduler):
    """While long prompts were computed, decodes stood still: from 270 tokens a second to 7."""
    harness = engine(num_blocks=60, token_budget=8, max_model_len=150, scheduler=scheduler)
    harness.ask("a", 3, 30)
    harness.ask("b", 4, 30)
    harness.step()
    harness.ask("long", 100, 2)
    for _ in range(20):
        assert [output.request_id for output in harness.step()][:2] == ["a", "b"]
    assert harness.answer("long"), "and the prompt is through: six tokens in each step"
    harness.drain()
    harness.is_right()


def test_s11_what_has_output_may_have_more_than_a_token_to_compute(scheduler=Scheduler):
    """Whoever had begun to answer was taken to decode: one token, or an assert fired."""
    harness = under_pressure(token_budget=8, scheduler=scheduler)
    harness.drain()
    again = [s for plan in harness.plans for s in plan.scheduled if s.kind == "recompute"]
    assert any(s.num_new > 1 and not s.draws for s in again), "chunks of it, too"
    harness.is_right()


# -- what a preemption leaves behind -------------------------------------------------------------


def test_s12_the_line_between_prompt_and_answer_stays(scheduler=Scheduler):
    """What was computed again counted as prompt, or was lost: the answer had another length."""
    harness = under_pressure(scheduler=scheduler)
    for _ in range(1_000):
        if not harness.core.has_work:
            break
        harness.step()
        for sequence in [*harness.scheduler.running, *harness.scheduler.waiting]:
            request = harness.requests[sequence.request.request_id]
            assert sequence.num_prompt_tokens == len(request.prompt)
            assert sequence.output == harness.answer(request.request_id)
    assert harness.counts["preempted"] > 0
    for name, request in harness.requests.items():
        assert harness.answer(name) == alone(request, 0, 14)


def test_s13_what_is_left_is_counted_at_each_admission(scheduler=Scheduler):
    """Back after a preemption, a sequence found its beginning in the cache, and was still planned
    as if it had not."""
    harness = under_pressure(num_blocks=12, memory={}, scheduler=scheduler)
    harness.drain()
    back = [
        scheduled.position
        for plan in harness.plans
        for scheduled in plan.scheduled
        if scheduled.kind == "recompute"
    ]
    assert any(position > 0 for position in back), "found"
    harness.is_right()


def test_s14_no_token_comes_out_twice(scheduler=Scheduler):
    """After a preemption the last token was sent again."""
    harness = under_pressure(scheduler=scheduler)
    sent: dict[str, int] = {}
    while harness.core.has_work:
        for output in harness.step():
            assert output.num_output_tokens == sent.get(output.name, 0) + 1
            sent[output.name] = output.num_output_tokens
    assert harness.counts["recomputed"] > 0
    harness.is_right()


def test_s15_a_full_host_pool_falls_back_to_recomputing(scheduler=Scheduler):
    """No room to swap to, and the request was aborted, or the engine with it."""
    for host_blocks in (1, 3, 5):
        harness = under_pressure(host_blocks=host_blocks, num_blocks=12, scheduler=scheduler)
        harness.drain()
        harness.is_right()
        assert harness.counts["preempted"] > 0
        assert harness.counts["recomputed"] > 0 or harness.counts["blocks out"] > 0
    assert harness.counts["blocks in"] > 0 < harness.counts["recomputed"], "some swap, some do not"


def test_s15_an_abort_gives_its_host_blocks_back(scheduler=Scheduler):
    """Otherwise the host pool fills up for good."""
    harness = under_pressure(host_blocks=40, num_blocks=12, scheduler=scheduler)
    while not any(sequence.host_blocks for sequence in harness.scheduler.waiting):
        harness.step()
    for name in harness.requests:
        harness.abort(name)
    harness.drain()


# -- the tests of the tests ----------------------------------------------------------------------

MUTANTS = [
    (test_s01_alone_without_memory_it_ends_and_says_so, mutants.AssertsThatMemorySuffices),
    (test_s01_it_ends_in_the_queue_as_well, mutants.TriesAgainForEver),
    (
        test_s02_what_never_fits_is_refused_and_what_just_fits_is_served,
        mutants.AcceptsWhatNeverFits,
    ),
    (
        test_s02_what_never_fits_is_refused_and_what_just_fits_is_served,
        mutants.WantsRoomForTheLastToken,
    ),
    (test_s03_there_is_one_limit_of_length, mutants.HasItsOwnLimit),
    (test_s04_memory_is_counted_in_blocks, mutants.CountsTokensInsteadOfBlocks),
    (test_s06_a_victim_of_this_step_is_unwound, mutants.KeepsTheBudgetOfTheVictim),
    (test_s06_a_victim_of_this_step_is_unwound, mutants.KeepsTheVictimInThePlan),
    (test_s07_who_was_preempted_keeps_its_place, mutants.BackOfTheQueue),
    (test_s07_nobody_comes_in_where_somebody_was_thrown_out, mutants.AdmitsAfterPreempting),
    (test_s07_who_comes_in_can_stay, mutants.LeavesNoBlockFree),
    (test_s08_equals_do_not_displace_each_other, mutants.DisplacesItsEquals),
    (test_s08_equals_do_not_displace_each_other, mutants.TiesByLastArrival),
    (test_s09_what_is_computed_again_is_counted, mutants.ForgetsWhatWasComputed),
    (test_s09_the_default_victim_wastes_little, mutants.ThrowsOutTheLongest),
    (test_s10_a_long_prompt_holds_nobody_up, mutants.PromptsFirst),
    (test_s11_what_has_output_may_have_more_than_a_token_to_compute, mutants.OneTokenOnceItAnswers),
    (test_s12_the_line_between_prompt_and_answer_stays, mutants.TakesOutputForPrompt),
    (test_s12_the_line_between_prompt_and_answer_stays, mutants.LosesOutput),
    (test_s13_what_is_left_is_counted_at_each_admission, mutants.KeepsTheCountOfBefore),
    (test_s14_no_token_comes_out_twice, mutants.SaysItAgain),
    (test_s14_no_token_comes_out_twice, mutants.LosesOutput),
    (test_s15_a_full_host_pool_falls_back_to_recomputing, mutants.NeedsTheHost),
    (test_s15_an_abort_gives_its_host_blocks_back, mutants.LosesTheHostBlocks),
]


@pytest.mark.parametrize(
    ("test", "mutant"),
    [pytest.param(*each, id=f"{each[0].__name__[5:8]}-{each[1].__name__}") for each in MUTANTS],
)
def test_it_fails_without_its_rule(test, mutant):
    test()
    option = "scheduler" if issubclass(mutant, Scheduler) else "queue"
    with pytest.raises((AssertionError, LookupError, RequestError, pytest.fail.Exception)):
        test(**{option: mutant})


def test_every_row_has_a_test_and_every_test_a_mutant():
    tests = {name for name in globals() if re.match(r"test_s\d\d_", name)}
    rows = [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert {int(name[6:8]) for name in tests} == set(rows)
    assert {test.__name__ for test, _ in MUTANTS} == tests
    own = {each for each in vars(mutants).values() if isinstance(each, type)}
    dropped = {each for each in own if each.__module__ == mutants.__name__}
    assert {mutant for _, mutant in MUTANTS} == dropped
