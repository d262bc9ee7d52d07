"""The kernels that make a step's inputs from the device's table equal their torch functions."""

from __future__ import annotations

import pytest
import torch
from kernel_data import DEVICE

from mie.kernels.inputs import (
    FROM_STATE,
    LENGTH,
    PADDING,
    TABLE,
    TOKEN,
    decode_inputs,
    decode_inputs_torch,
    step_inputs,
    step_inputs_torch,
    write_state,
    write_state_torch,
)

INT32, INT64 = torch.int32, torch.int64


def ints(values, dtype=INT32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def table(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows with any 32 bits in them, but lengths that the blocks hold."""
    generator = torch.Generator().manual_seed(seed)
    state_RC = torch.randint(-(2**31), 2**31 - 1, (rows, TABLE + width), generator=generator).int()
    state_RC[:, LENGTH] = torch.randint(0, 4 * width, (rows,), generator=generator)
    state_RC[:, 2] = torch.rand(rows, generator=generator).view(INT32)
    state_RC[:, TABLE:] = torch.randint(1, 1 << 20, (rows, width), generator=generator)
    return state_RC.to(DEVICE)


@pytest.mark.parametrize("count", [1, 5, 255, 256, 300])
def test_writes_reach_their_places_and_no_other(count):
    state_RC = table(40, 12)
    places = torch.randperm(40 * 20, generator=torch.Generator().manual_seed(count))[:count]
    values = torch.arange(count) - count // 2
    writes_3U = torch.stack((places // 20, places % 20, values)).int().to(DEVICE)
    expected = state_RC.clone()
    write_state_torch(expected, writes_3U)
    write_state(state_RC, writes_3U)
    assert torch.equal(state_RC, expected)


def test_no_writes_are_no_launch():
    state_RC = table(2, 2)
    before = state_RC.clone()
    write_state(state_RC, ints([[], [], []]))
    assert torch.equal(state_RC, before)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    "rows", [[0], [PADDING], [3, PADDING, 1], [*range(6, 0, -1), PADDING], [*range(130)]]
)
def test_a_decode_step_reads_its_rows_and_advances_them(block_size, rows):
    state_RC = table(140, 16, seed=len(rows))
    expected_state = state_RC.cpu().clone()
    expected = decode_inputs_torch(expected_state, torch.tensor(rows), block_size)
    X = len(rows)
    dtypes = (INT64, INT64, INT64, INT32, torch.float32, INT64, INT32)
    got = [torch.full((X + 1,), -7, dtype=dtype, device=DEVICE) for dtype in dtypes]
    decode_inputs(state_RC, ints(rows), *[each[:X] for each in got], block_size)
    for mine, oracle in zip(got, expected, strict=True):
        assert mine[X] == -7, "written behind the end"
        assert torch.equal(mine[:X].cpu(), oracle.to(mine.dtype))
    assert torch.equal(state_RC.cpu(), expected_state)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [40], [3, 1, 33, 1], [32, 31, 1]])
def test_a_step_of_any_kind(counts):
    """Tokens come from the host, or where it does not know them from the row."""
    block_size, width = 4, 32
    state_RC = table(8, width, seed=sum(counts))
    S, T = len(counts), sum(counts)
    rows = torch.randperm(8, generator=torch.Generator().manual_seed(S))[:S].tolist()
    firsts = [3 * s for s in range(S)]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    given = [FROM_STATE if t in starts[:-1] and t % 2 else 100 + t for t in range(T)]
    expected_state = state_RC.cpu().clone()
    arguments = [torch.tensor(each).int() for each in (rows, starts, firsts, given)]
    expected = step_inputs_torch(expected_state, *arguments, block_size)
    got = [torch.full((T + 1,), -7, dtype=INT64, device=DEVICE) for _ in range(3)]
    lengths_S = torch.full((S + 1,), -7, dtype=INT32, device=DEVICE)
    outputs = [*[each[:T] for each in got], lengths_S[:S]]
    step_inputs(state_RC, *[a.to(DEVICE) for a in arguments], *outputs, block_size, max(counts))
    for mine, oracle in zip([*got, lengths_S], expected, strict=True):
        assert mine[-1] == -7, "written behind the end"
        assert torch.equal(mine[:-1].cpu(), oracle.to(mine.dtype))
    assert torch.equal(state_RC.cpu(), expected_state)
    assert torch.equal(state_RC[:, TOKEN].cpu(), table(8, width, seed=T)[:, TOKEN].cpu())
