"""The fast step changes nothing but time: with recorded steps, in pieces, ahead of its tokens.

On a GPU everything here runs the kernels; elsewhere their torch functions stand in, and one run is
interpreted.
"""

from __future__ import annotations

import pytest
import torch
from device_engine import device_engine, device_runner, is_right
from engine_harness import Harness
from fake_runner import StepFailedError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_data import DEVICE
from schedules import CASES, Case
from tiny_decoder import count_near_ties

from mie.engine.assemble import LARGEST_GROUP, MOST_SEQUENCES
from mie.execution import device_state
from mie.execution.compile_ahead import every_kernel
from mie.execution.cuda_graphs import DecodeGraphs, batch_sizes
from mie.execution.device_state import LENGTH, TABLE, TOKEN, DeviceState, draw_words
from mie.execution.skinny_forward import FEW
from mie.kernels import decode_plan, inputs
from mie.memory.manager import BlockManager
from mie.memory.prefix_cache import NoPrefixCache
from mie.ops.fast import triton_ops
from mie.sampling_params import Draw
from mie.scheduling.limits import Limits
from mie.scheduling.plan import PENDING, ScheduledSequence, StepPlan

LONG = settings.get_current_profile_name() == "long"
WAYS = [  # steps in flight (0: each is waited for), and whether decode steps are recorded
    pytest.param(0, False, id="in pieces"),
    pytest.param(0, True, id="recorded"),
    pytest.param(2, False, id="ahead"),
    pytest.param(2, True, id="recorded and ahead"),
]


def ask_many(harness: Harness, count: int, prompt: int = 5, out: int = 9) -> None:
    for number in range(count):
        harness.ask(f"r{number}", prompt + number % 3, out + number % 2, seed=number)


# -- the same tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "graphs"), WAYS)
@pytest.mark.parametrize("count", [1, 7, 8, 9], ids=["one", "cap-1", "cap", "cap+1"])
def test_any_number_of_sequences_at_a_cap_of_eight(count, depth, graphs):
    """S33: the sizes at which padding begins and ends. The ninth waits for a place."""
    harness = device_engine(depth, max_num_seqs=8, token_budget=24, graphs=graphs)
    ask_many(harness, count)
    harness.drain()
    assert is_right(harness) == 0


@pytest.mark.parametrize(("depth", "graphs"), WAYS)
@pytest.mark.parametrize("host_blocks", [0, 30], ids=["recompute", "swap"])
def test_preemption_abort_forks_and_prefix_hits(host_blocks, depth, graphs):
    harness = device_engine(depth, 14, host_blocks=host_blocks, graphs=graphs)
    harness.ask("first", tuple(range(1, 13)), 14)
    for _ in range(4):
        harness.step()
    harness.ask("again", (*range(1, 11), 3), 6)
    harness.ask("three", 4, 6, n=3, temperature=1.0, seed=5)
    harness.ask("gone", 6, 14)
    for _ in range(3):
        harness.step()
    harness.abort_in_flight("gone")
    ask_many(harness, 4, out=20)
    harness.drain()
    assert is_right(harness) == 0
    assert harness.counts["preempted"] and harness.counts["abort"]
    assert any(plan.num_cached_tokens for plan in harness.plans)


def test_a_sequence_grows_to_the_end_of_the_context():
    """S30: the table of a row is as wide as the longest text, and no wider."""
    harness = device_engine(2, 60, max_num_seqs=2)
    harness.ask("long", 5, None)
    harness.ask("short", 40, None)
    harness.drain()
    assert is_right(harness) == 0
    assert len(harness.answer("long")) == 59 and len(harness.answer("short")) == 24


def test_ahead_and_not_the_plans_hold_the_same_work():
    """An end by length is known in advance: no step computes anything in vain."""
    sums = []
    for depth in (0, 2):
        harness = device_engine(depth)
        ask_many(harness, 6)
        harness.drain()
        sums.append(sum(plan.num_tokens for plan in harness.plans))
    assert sums[0] == sums[1]


def test_an_end_that_is_seen_late_costs_one_token():
    """S34: the step behind it runs with it, what that chose is thrown away, and blocks go back."""
    sums = []
    for depth in (0, 2):
        harness = device_engine(depth)
        for number in range(4):
            harness.ask(f"r{number}", 5, 20, eos_ids=frozenset(range(0, 31, 3)))
        harness.drain()
        assert is_right(harness) == 0
        ended = harness.counts["stop"]
        sums.append(sum(plan.num_tokens for plan in harness.plans))
    assert ended and sums[1] - sums[0] == ended


class OnDevice:
    """Steps that may break off before or after they have been launched."""

    def __init__(self, case: Case) -> None:
        setting, memory = case.setting, case.memory()
        limits = setting.limits()
        self.runner = device_runner(memory, limits, in_flight=setting.depth, graphs=False)
        self.fail_next: str | None = None
        self.harness = case.harness(memory, self.runner.run, launch=self.launch)

    def fail(self, when: str) -> None:
        self.fail_next = when

    def launch(self, plan: StepPlan):
        failing, self.fail_next = self.fail_next, None
        if failing == "before":
            raise StepFailedError
        launched = self.runner.launch(plan)
        if failing is not None:
            raise StepFailedError
        return launched


@settings(max_examples=1_000 if LONG else 25, suppress_health_check=list(HealthCheck))
@given(CASES, st.sampled_from([1, 2, 4, 8, 16]))
def test_any_schedule(case, block_size):
    """The random engines of ``test_schedule_properties``, on a device that is ahead."""
    sizes = {**vars(case.setting), "block_size": block_size}
    case = Case(type(case.setting)(**sizes), case.asks, case.failures)
    device = OnDevice(case)
    case.drive(device.harness, device.fail)
    for (request_id, index), reason in device.harness.ends.items():
        request = device.harness.requests[request_id]
        answer = device.harness.answer(request_id, index)
        device.harness.ends_rightly(request, answer, reason)
        if answer:
            count_near_ties(request, index, answer)


@pytest.mark.skipif(DEVICE == "cuda", reason="all of the above runs the kernels on a GPU")
def test_the_kernels_interpreted():
    """A chunk, a mixed step and decodes, one of them drawn, with a row of padding."""
    harness = device_engine(2, max_num_seqs=3, ops=triton_ops())
    harness.ask("a", 5, 3)
    harness.ask("b", 14, 2, temperature=1.0, seed=3)
    harness.ask("c", 3, 3)
    harness.drain()
    assert is_right(harness) == 0


# -- what is told to the device ------------------------------------------------------------------


def part(sequence_id, token, position, blocks, draws=((0.5, 7, 1),), number=0):
    made = tuple(Draw(t, seed, position + 1, index) for t, seed, index in draws)
    return ScheduledSequence(sequence_id, "s", "decode", (token,), position, blocks, 4, made)


def test_a_row_is_told_what_differs_and_nothing_else():
    state = DeviceState(4, 2)
    (row,) = state.step([part(9, 5, 0, (7,))])
    temperature, low, high = draw_words(Draw(0.5, 7, 1, 1))
    told = {(TABLE, 7), (LENGTH, 0), (TOKEN, 5), (2, temperature), (3, low), (4, high)}
    assert {(column, value) for _, column, value in state.take_writes()} == told
    for position in (1, 2, 3):
        assert state.step([part(9, PENDING, position, (7,))]) == [row]
        assert state.take_writes() == []
    state.step([part(9, PENDING, 4, (7, 2))])
    assert state.take_writes() == [(row, TABLE + 1, 2)]
    state.step([part(9, PENDING, 5, (6, 2))])  # an equal block was there before
    assert state.take_writes() == [(row, TABLE, 6)]
    state.step([part(9, 8, 2, (6,))])  # it was thrown out and comes back with less
    assert sorted(state.take_writes()) == [(row, LENGTH, 2), (row, TOKEN, 8)]


def test_what_stands_in_two_places_is_the_same():
    """Where Triton is missing, the engine cannot ask its kernels for their numbers."""
    names = ("LENGTH", "TOKEN", "TEMPERATURE", "KEY", "TABLE", "PADDING")
    assert [getattr(device_state, n) for n in names] == [getattr(inputs, n) for n in names]
    assert PENDING == inputs.FROM_STATE
    assert (MOST_SEQUENCES, LARGEST_GROUP) == (decode_plan.MAX_SEQUENCES, decode_plan.MAX_GROUP)
    few, more = (decode_plan.decode_config(16, 8, 128, torch.bfloat16, n) for n in (FEW, FEW + 1))
    assert few != more


def test_a_pending_token_must_be_on_the_device():
    state = DeviceState(4, 2)
    state.step([part(1, 5, 0, (7,), draws=())])  # nothing was chosen
    with pytest.raises(AssertionError, match="neither in the plan nor on the device"):
        state.step([part(1, PENDING, 1, (7,))])


def test_a_row_is_given_away_when_no_step_can_still_use_it():
    state = DeviceState(2, 2)
    first = state.step([part(1, 5, 0, (7,))])
    second = state.step([part(2, 5, 0, (8,))])
    assert state.step([part(2, PENDING, 1, (8,)), part(3, 5, 0, (9,))]) == [*second, *first]
    with pytest.raises(AssertionError, match="2 rows, and all of them in steps that are out"):
        state.step([part(4, 5, 0, (3,))])


def test_after_a_step_that_broke_off_everything_is_told_again():
    state = DeviceState(2, 2)
    state.step([part(1, 5, 0, (7,))])
    told = state.take_writes()
    state.forget()
    state.step([part(1, 5, 0, (7,))])
    assert state.take_writes() == told


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 100, 256, 257, 600, 1024])
def test_sizes_hold_every_batch_with_little_padding(most):
    sizes = batch_sizes(most)
    graphs = DecodeGraphs(lambda size: None, sizes)
    assert sizes[-1] == most and sizes == sorted({*sizes})
    for count in range(1, most + 1):
        size = graphs.size_for(count)
        assert size is not None and 0 <= size - count < max(8, count / 8)
    assert graphs.size_for(most + 1) is None


def test_without_recordings_a_replay_runs_the_step():
    ran: list[int] = []
    graphs = DecodeGraphs(ran.append, [4, 2])
    graphs.replay(2)
    graphs.close()
    graphs.replay(4)
    assert ran == [2, 4]


def test_the_pool_is_whole_without_a_prefix_cache():
    harness = device_engine(2, 12, memory={"prefix_cache": NoPrefixCache})
    ask_many(harness, 9)
    harness.drain()
    assert is_right(harness) == 0


@pytest.mark.skipif(DEVICE == "cuda", reason="every capture above compiles ahead on a GPU")
def test_what_is_called_to_compile_changes_nothing():
    runner = device_runner(BlockManager(9, 4), Limits(2, 8, 16), ops=triton_ops())
    state, kv = runner.state_RC.clone(), runner.cache.kv_L2NBGD.clone()
    with torch.inference_mode():
        for call in every_kernel(runner):
            call()
    assert torch.equal(runner.state_RC, state)
    assert torch.equal(runner.cache.kv_L2NBGD.isnan(), kv.isnan())


def test_a_runner_that_was_closed_still_works():
    """S32: recorded steps go before the memory that they point to; without them it is slower."""
    harness = device_engine(2)
    ask_many(harness, 3)
    harness.step()
    harness.runner.close()
    harness.drain()
    assert is_right(harness) == 0 and not harness.runner.graphs.graphs


def test_a_temperature_beyond_float32_harms_nobody():
    """It is legal, and draws are even then; others in its step are not touched."""
    harness = device_engine(2)
    harness.ask("hot", 4, 5, temperature=1e300, seed=1)
    harness.ask("other", 5, 6)
    harness.drain()
    assert len(harness.answer("hot")) == 5
    assert count_near_ties(harness.requests["other"], 0, harness.answer("other")) == 0


def test_when_all_have_ended_nothing_stays_out():
    """S35: after the last answer every block is free, though a step was ahead of its end."""
    harness = device_engine(2)
    harness.ask("r", 5, 20, eos_ids=frozenset(range(31)))
    while not harness.ends:
        harness.step()
    assert harness.core.has_work and harness.core.settle() == []
    assert not harness.core.has_work
    harness.is_empty()


def test_whoever_gives_up_leaves_nothing_behind():
    harness = device_engine(2)
    harness.ask("r", 5, 20)
    for _ in range(3):
        harness.step()
    harness.abort("r")
    harness.core.settle()
    assert harness.memory.pool.num_used == 0
