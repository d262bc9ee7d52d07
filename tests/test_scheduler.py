"""The scheduler by its plans: who computes what in which step. No model; the device is fake.

That no schedule changes an answer is in ``test_schedule_properties.py``, and what other engines did
wrong in ``test_known_bugs_scheduling.py``.
"""

from __future__ import annotations

import random

import pytest
from engine_harness import Harness, engine
from hypothesis import given
from hypothesis import strategies as st

from mie.errors import PartError
from mie.memory.prefix_cache import NoPrefixCache
from mie.request import FinishReason, Request, Sequence
from mie.sampling_params import SamplingParams
from mie.scheduling.plan import PENDING, StepResult, StepsInFlightError
from mie.scheduling.policy import choose, fewest_computed, last_admitted, least_urgent
from mie.scheduling.queue import FirstComeFirstServed, StrictPriority
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler

UNCACHED = {"prefix_cache": NoPrefixCache}


def steps(harness: Harness) -> list[str]:
    """What each step computes, as it prints."""
    return [repr(plan).partition(": ")[2].partition(": ")[2] for plan in harness.plans]


# -- one token budget ----------------------------------------------------------------------------


def test_the_table_of_the_docstring():
    """Budget 16: two decodes, a prompt of 40 in chunks, and the beginning of one that waits."""
    harness = engine(num_blocks=60, max_num_seqs=8, token_budget=16)
    harness.ask("a", 2, 9)
    harness.ask("b", 3, 9)
    harness.step()
    harness.ask("c", 40, 4)
    harness.ask("d", 10, 4)
    harness.drain()
    assert steps(harness)[1:5] == [
        "a[2] b[3] c[0:14]",
        "a[3] b[4] c[14:28]",
        "a[4] b[5] c[28:40] d[0:2]",
        "a[5] b[6] c[40] d[2:10]",
    ]
    harness.is_right()


def test_a_sequence_joins_and_leaves_at_any_step():
    """Nobody waits for the end of somebody else."""
    harness = engine(max_num_seqs=2)
    for number, output in enumerate((5, 1, 2, 1)):
        harness.ask(f"r{number}", 3, output)
    harness.drain()
    assert steps(harness) == [
        "r0[0:3] r1[0:3]",
        "r0[3] r2[0:3]",
        "r0[4] r2[3]",
        "r0[5] r3[0:3]",
        "r0[6]",
    ]


@pytest.mark.parametrize("memory", [{}, UNCACHED])
def test_a_follow_up_computes_only_what_is_new(memory):
    """A turn of a chat: its prompt begins with the prompt and the answer of the turn before."""
    harness = engine(num_blocks=40, token_budget=64, max_model_len=200, memory=memory)
    first = harness.ask("first", 21, 12)
    harness.drain()
    follow_up = (*first.prompt, *harness.answer("first"), 1, 2, 3)
    harness.ask("second", follow_up, 2)
    (output,) = harness.step()
    found = 0 if memory else (21 + 12 - 1) // 4 * 4
    assert output.num_cached_tokens == found
    assert harness.plans[-1].num_tokens == len(follow_up) - found
    assert harness.core.trace.records[-1].num_cached_tokens == found
    harness.drain()
    harness.is_right()


def test_several_answers_compute_their_prompt_once():
    harness = engine(num_blocks=40, token_budget=16, memory=UNCACHED)
    harness.ask("r", 18, 3, n=3, temperature=1.0, seed=3)
    harness.drain()
    assert steps(harness) == [
        "r/0[0:16]",
        "r/0[16:18]",
        "r/0[18] r/1[18] r/2[18], 2 blocks copied",
        "r/0[19] r/1[19] r/2[19]",
    ]
    assert len({tuple(harness.answer("r", index)) for index in range(3)}) == 3
    harness.is_right()


def test_seats_are_kept_for_answers_to_come():
    """A prompt whose three answers have no seats does not come in, however small it is."""
    harness = engine(max_num_seqs=3, token_budget=4)
    harness.ask("a", 2, 3)
    harness.ask("b", 6, 2, n=3)
    harness.ask("c", 1, 1)
    harness.drain()
    assert steps(harness)[:4] == ["a[0:2]", "a[2]", "a[3]", "b/0[0:4]"]
    assert [name for name, _ in harness.ends][-1] == "c", "and nobody jumps the queue"
    harness.is_right()


def test_a_salt_keeps_prefixes_apart():
    harness = engine(num_blocks=40, token_budget=64)
    prompt = tuple(range(20))
    for number, salt in enumerate(("one", "one", "two")):
        harness.add(Request(f"r{number}", prompt, salt=salt))
        (output,) = [o for o in harness.step() if o.num_output_tokens == 1]
        assert output.num_cached_tokens == (16 if number == 1 else 0)


# -- who makes room ------------------------------------------------------------------------------


def candidates(*computed: int) -> list[Sequence]:
    made = []
    for number, tokens in enumerate(computed, start=1):
        sequence = Sequence(Request(f"r{number}", (1,) * 9, priority=number % 2), number, number, 9)
        sequence.num_computed = tokens
        made.append(sequence)
    return made


def test_the_two_policies():
    four = candidates(5, 2, 7, 2)
    assert last_admitted(four) is four[3]
    assert fewest_computed(four) is four[3], "of equals the last"
    assert fewest_computed(four[:3]) is four[1]


def test_with_priorities_only_the_least_urgent_are_candidates():
    four = candidates(1, 1, 1, 1)
    assert least_urgent(four, StrictPriority()) == [four[0], four[2]]
    assert least_urgent(four, FirstComeFirstServed()) == four
    assert least_urgent([], StrictPriority()) == []


def test_a_policy_that_chooses_a_stranger_is_told_so():
    two, stranger = candidates(1, 1), candidates(1)[0]
    with pytest.raises(PartError, match="not among"):
        choose(lambda each: stranger, two)
    with pytest.raises(PartError, match="chose None"):
        choose(lambda each: None, two)

    def clears(each):
        victim = each[0]
        each.clear()
        return victim

    assert choose(clears, two) is two[0] and len(two) == 2, "it gets a list of its own"


def test_the_first_in_line_is_never_a_candidate():
    seen: list[list[str]] = []

    def first(each):
        seen.append([sequence.name for sequence in each])
        return each[0]

    harness = engine(9, max_num_seqs=4, memory=UNCACHED, victim_policy=first)
    for number in range(5):
        harness.ask(f"r{number}", 5, 12)
    harness.drain()
    harness.is_right()
    assert seen and not any("r0" in names for names in seen)


@given(seed=st.integers(0, 10_000), host_blocks=st.sampled_from([0, 3, 30]), priority=st.booleans())
def test_any_policy_comes_to_an_end(seed, host_blocks, priority):
    """Even one that throws dice. Blocks of two tokens, and hardly more of them than one needs."""
    dice = random.Random(seed)
    harness = engine(
        dice.randint(10, 13),
        block_size=2,
        token_budget=dice.randint(4, 9),
        host_blocks=host_blocks,
        memory=UNCACHED,
        victim_policy=dice.choice,
        queue=StrictPriority() if priority else None,
    )
    for number in range(6):
        harness.ask(f"r{number}", dice.randint(1, 9), dice.randint(1, 12), number % 3)
    harness.drain(1_000)
    harness.is_right()


def test_an_urgent_request_takes_the_place_of_the_least_urgent():
    harness = engine(max_num_seqs=2, queue=StrictPriority(), memory=UNCACHED)
    harness.ask("low", 3, 4, priority=2)
    harness.ask("middle", 3, 4, priority=1)
    harness.step()
    harness.ask("high", 3, 2, priority=0)
    harness.drain()
    assert steps(harness) == [
        "middle[0:3] low[0:3]",
        "middle[3] high[0:3], 1 preempted",
        "middle[4] high[3]",
        "middle[5] low[0:4]",
        "low[4]",
        "low[5]",
    ]
    harness.is_right()


def test_nobody_slips_in_behind_the_one_for_whom_room_was_made():
    """Two seats become free, and only one of them is for now."""
    harness = engine(max_num_seqs=3, queue=StrictPriority(), memory=UNCACHED)
    for name in ("low", "lower", "lowest"):
        harness.ask(name, 3, 6, priority=len(name))
    harness.step()
    harness.ask("pair", 3, 2, priority=0, n=2)
    harness.ask("next", 2, 2, priority=1)
    harness.drain()
    assert steps(harness)[1:3] == [
        "low[3] pair/0[0:3], 2 preempted",
        "pair/0[3] pair/1[3] next[0:2], 1 blocks copied, 1 preempted",
    ]
    harness.is_right()


def test_swapped_out_it_comes_back_without_computing_again():
    asked = [(f"r{number}", 6, 14) for number in range(5)]
    counts = []
    for host_blocks in (0, 40):
        harness = engine(12, host_blocks=host_blocks, memory=UNCACHED)
        for request in asked:
            harness.ask(*request)
        harness.drain()
        harness.is_right()
        counts.append((harness.counts["recomputed"] > 0, harness.counts["blocks in"] > 0))
        assert harness.counts["preempted"] > 0
        assert harness.counts["blocks in"] == harness.counts["blocks out"]
    assert counts == [(True, False), (False, True)]


# -- aborts --------------------------------------------------------------------------------------


def in_each_state() -> Harness:
    """ "swapped" and "lost" were preempted; "runs" runs, "prefills" does too, "waits" never has."""
    harness = engine(11, max_num_seqs=4, token_budget=8, host_blocks=3, memory=UNCACHED)
    harness.ask("runs", 5, 20)
    for number in range(4):
        harness.ask(f"r{number}", 7, 20)
    return harness


@pytest.mark.parametrize("victim", ["runs", "r0", "r1", "r2", "r3", "unknown"])
@pytest.mark.parametrize("at", range(0, 40, 3))
def test_an_abort_harms_nobody_else(victim, at):
    """Twice, at any moment, in any state; the others answer as they would have."""
    harness = in_each_state()
    for _ in range(at):
        harness.step()
    had = len(harness.answer(victim))
    ended = (victim, 0) in harness.ends
    harness.abort(victim)
    harness.abort(victim)
    harness.drain()
    harness.abort(victim)
    assert not harness.core.has_work
    harness.is_right()
    if victim != "unknown" and not ended:
        assert harness.ends[victim, 0] is FinishReason.ABORT
        assert len(harness.answer(victim)) == had
    assert harness.counts[FinishReason.LENGTH] == 5 - (victim != "unknown" and not ended)


@pytest.mark.parametrize("at", range(0, 20, 2))
def test_an_abort_while_a_step_is_computed_waits_for_it(at):
    """Its blocks may not go to others before the step that writes into them has come back."""
    harness = in_each_state()
    for _ in range(at):
        harness.step()
    runner, used = harness.run, []

    def run(plan):
        before = harness.memory.pool.num_used
        harness.aborted.add("runs")
        harness.core.abort("runs")
        used.append((before, harness.memory.pool.num_used))
        return runner(plan)

    harness.run = run
    outputs = harness.step()
    harness.run = runner
    assert len({*used[0]}) == 1, "nothing is given back yet"
    mine = [output for output in outputs if output.request_id == "runs"]
    assert [(o.token_id, o.finish_reason) for o in mine] == [(None, FinishReason.ABORT)]
    assert all(sequence.request.request_id != "runs" for sequence in harness.scheduler.running)
    harness.drain()
    harness.is_right()


def test_an_abort_ends_every_answer_also_those_to_come():
    for at in (0, 1, 3):
        harness = engine(num_blocks=40, token_budget=8)
        harness.ask("r", 12, 9, n=3)
        for _ in range(at):
            harness.step()
        harness.abort("r")
        assert harness.core.has_work, "the ends have to be told"
        assert len(harness.step()) == 3
        harness.is_empty()
        assert {*harness.ends.values()} == {FinishReason.ABORT} and len(harness.ends) == 3


# -- order of calls ------------------------------------------------------------------------------


def test_a_plan_that_nobody_brings_back_has_failed():
    """An interrupt can come between any two lines: the next step goes on from there."""
    scheduler = engine().scheduler
    scheduler.add(Request("r", (1, 2)))
    lost = scheduler.schedule()
    plan = scheduler.schedule()
    assert plan.scheduled[0].token_ids == lost.scheduled[0].token_ids == (1, 2)
    with pytest.raises(AssertionError, match="not the oldest step that is out"):
        scheduler.update(lost, StepResult())


def test_a_result_of_another_plan_changes_nothing():
    scheduler = engine().scheduler
    sequence = scheduler.add(Request("r", (1, 2)))
    plan = scheduler.schedule()
    for tokens in ({}, {sequence.sequence_id: (1, 2)}, {99: (1,)}):
        with pytest.raises(PartError, match="1 tokens wanted for r"):
            scheduler.update(plan, StepResult(tokens))
    [output] = scheduler.update(plan, StepResult({sequence.sequence_id: (5,)}))
    assert output.token_id == 5 and sequence.output == [5]


def test_a_refused_request_leaves_nothing_behind():
    harness = engine(num_blocks=4)
    with pytest.raises(Exception, match="blocks of 4"):
        harness.ask("r", 20, 4)
    assert not harness.core.has_work and len(harness.scheduler.waiting) == 0


# -- static batches ------------------------------------------------------------------------------


def test_a_wave_is_a_rectangle_and_padding_fills_it():
    """The picture of the docstring: prompts of 5, 2, 3 and answers of 8, 3, 5; "d" waits."""
    harness = engine(num_blocks=60, max_num_seqs=3, scheduler=StaticScheduler, memory=UNCACHED)
    for name, prompt, output in (("a", 5, 8), ("b", 2, 3), ("c", 3, 5), ("d", 4, 2)):
        harness.ask(name, prompt, output)
    harness.drain()
    assert [(plan.num_tokens, plan.num_padding) for plan in harness.plans] == [
        (10, 3 * 5 - 10),
        *[(3, 0)] * 2,
        *[(2, 1)] * 2,
        *[(1, 2)] * 3,
        (4, 0),
        (1, 0),
    ]
    harness.is_right()


@given(
    asked=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=9),
    rows=st.integers(1, 4),
)
def test_padding_is_what_the_rectangles_have_too_much(asked, rows):
    """Waves of ``rows`` requests in their order, where memory holds them all."""
    harness = engine(60, max_num_seqs=rows, scheduler=StaticScheduler, memory=UNCACHED)
    for number, (prompt, output) in enumerate(asked):
        harness.ask(f"r{number}", prompt, output)
    harness.drain()
    harness.is_right()
    computed = padded = steps = 0
    for first in range(0, len(asked), rows):
        wave = asked[first : first + rows]
        longest, last = (max(numbers) for numbers in zip(*wave, strict=True))
        useful = sum(prompt + output - 1 for prompt, output in wave)
        computed += useful
        padded += len(wave) * (longest + last - 1) - useful
        steps += last
    assert sum(plan.num_tokens for plan in harness.plans) == computed
    assert sum(plan.num_padding for plan in harness.plans) == padded
    assert len(harness.plans) == steps


def test_a_wave_holds_what_fits_at_its_longest():
    """So nobody in it is ever preempted."""
    harness = engine(8, max_num_seqs=4, scheduler=StaticScheduler, memory=UNCACHED)
    for number in range(5):
        harness.ask(f"r{number}", 5, 8)  # 12 slots, 3 blocks
    harness.drain()
    harness.is_right()
    assert harness.counts["preempted"] == 0
    assert steps(harness)[0].startswith("r0[0:5] r1[0:5]") and "r2" not in steps(harness)[0]


def test_the_budget_cuts_no_prompt_of_a_wave():
    harness = engine(60, token_budget=4, scheduler=StaticScheduler)
    harness.ask("r", 30, 2)
    harness.step()
    assert harness.plans[0].num_tokens == 30


@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler])
def test_the_counters_of_the_cache_count_each_request_once(scheduler):
    """However often its admission was tried, and however often it came back."""
    harness = engine(12, max_num_seqs=4, scheduler=scheduler)
    prompts = [7, 5, 6, 8, 7, 5]
    for number, prompt in enumerate(prompts):
        harness.ask(f"r{number}", prompt, 16)
    harness.drain()
    assert harness.memory.prefix_cache.hits.queried == sum(prompts)


# -- two steps in flight -------------------------------------------------------------------------


def two_in_flight(**options):
    scheduler = engine(**options).scheduler
    scheduler.max_in_flight = 2
    return scheduler


def test_blocks_go_back_when_no_step_works_for_their_owner_any_longer():
    """S34: its end is seen while the next step is out, which still writes into its blocks."""
    scheduler = two_in_flight()
    sequence = scheduler.add(Request("r", (1, 2, 3), eos_ids=frozenset({7})))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.scheduled[0].token_ids == (PENDING,)
    [output] = scheduler.update(first, StepResult({sequence.sequence_id: (7,)}))
    assert output.finish_reason is FinishReason.STOP
    assert sequence.table is not None and scheduler.memory.pool.num_used == 1
    assert scheduler.update(second, StepResult({sequence.sequence_id: (5,)})) == []
    assert sequence.output == [7], "what the second step chose comes too late"
    assert sequence.table is None and not scheduler.has_work


def test_an_abort_in_flight_waits_for_its_steps_too():
    scheduler = two_in_flight()
    sequence = scheduler.add(Request("r", (1, 2, 3)))
    plans = [scheduler.schedule(), scheduler.schedule()]
    scheduler.abort("r")
    scheduler.abort("r")
    for plan in plans:
        assert sequence.table is not None
        scheduler.update(plan, StepResult({sequence.sequence_id: (5,)}))
    assert sequence.table is None and sequence.output == [] and not scheduler.has_work


def test_nobody_is_thrown_out_while_a_step_is_out():
    """The scheduler asks for it to come back, and nothing has changed."""
    scheduler = two_in_flight(num_blocks=4, memory={"prefix_cache": NoPrefixCache})
    four = SamplingParams(max_tokens=4)
    one = scheduler.add(Request("one", (1, 2, 3, 4, 5, 6, 7), four))
    two = scheduler.add(Request("two", (1, 2, 3, 4), four))
    first = scheduler.schedule()
    assert len(first.scheduled) == 2 and scheduler.memory.pool.num_free == 1
    second = scheduler.schedule()
    before = [(s.num_computed, s.table.num_tokens) for s in scheduler.running]
    scheduler.update(first, StepResult({s.sequence_id: (5,) for s in (one, two)}))
    with pytest.raises(StepsInFlightError):
        scheduler.schedule()
    assert [(s.num_computed, s.table.num_tokens) for s in scheduler.running] == before
    scheduler.update(second, StepResult({s.sequence_id: (5,) for s in (one, two)}))
    assert scheduler.schedule().preempted == ("two",)
