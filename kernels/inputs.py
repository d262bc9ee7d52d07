"""What a step reads, made on the device from what the device knows: the table of sequences.

Invariant: a row of ``state_RC`` is all that a step needs to know of one sequence, and a decode step
leaves it as the next one needs it. So while the same sequences decode, nothing is copied to the
device at all.

::

    column      0         1        2             3, 4           8 ...
    state_RC    length    token    temperature   key            block table
    row 0       37        512      0.8 (bits)    low, high      7  2  9  0  0 ...
    row 1       5         81       0.0           ...            4  0  0  0  0 ...

``length`` tokens have K and V, ``token`` is the next one to compute. The host changes a row by
writing numbers into it, (row, column, value), mostly a block that was added: ``write_state``.

Cost: a few bytes for each sequence; the launches are what takes time, about a microsecond each in a
graph. State on the device, advanced there, after vLLM's model runner V2 and gpt-fast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import cdiv

LENGTH, TOKEN, TEMPERATURE, KEY, TABLE = 0, 1, 2, 3, 8  # columns; KEY takes two
PADDING = -1  # in place of a row: a sequence that is none
FROM_STATE = -1  # in place of a token that only the device knows


@triton.jit(do_not_specialize=["count", "stride"])
def _write_state_kernel(
    state_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(writes_ptr + at, mask=inside, other=0).to(tl.int64)
    column = tl.load(writes_ptr + count + at, mask=inside, other=0)
    value = tl.load(writes_ptr + 2 * count + at, mask=inside, other=0)
    tl.store(state_ptr + row * stride + column, value, mask=inside)


def write_state_torch(state_RC: Tensor, writes_3U: Tensor) -> None:
    """What ``write_state`` must equal."""
    row, column, value = writes_3U.long()
    state_RC[row, column] = value.to(torch.int32)


def write_state(state_RC: Tensor, writes_3U: Tensor) -> None:
    """``state_RC[row, column] = value`` for each column of ``writes_3U``; no place stands twice."""
    count = writes_3U.shape[1]
    if count:
        _write_state_kernel[(cdiv(count, 256),)](
            state_RC, writes_3U, count, state_RC.stride(0), BLOCK=256, num_warps=4
        )


@triton.jit(do_not_specialize=["count", "stride"])
def _decode_inputs_kernel(
    state_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    draw_positions_ptr: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    B: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = x < count
    row = tl.load(rows_ptr + x, mask=inside, other=-1)
    real = row >= 0
    row_ptr = state_ptr + row.to(tl.int64) * stride
    length = tl.load(row_ptr, mask=real, other=0)
    token = tl.load(row_ptr + 1, mask=real, other=0)
    block = tl.load(row_ptr + TABLE + length // B, mask=real, other=0)
    slot = block.to(tl.int64) * B + length % B
    low = tl.load(row_ptr + 3, mask=real, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(row_ptr + 4, mask=real, other=0).to(tl.int64)
    temperature = tl.load(row_ptr + 2, mask=real, other=0).to(tl.float32, bitcast=True)
    tl.store(token_ids_ptr + x, token.to(tl.int64), mask=inside)
    tl.store(positions_ptr + x, length.to(tl.int64), mask=inside)
    tl.store(slots_ptr + x, tl.where(real, slot, -1), mask=inside)
    tl.store(lengths_ptr + x, tl.where(real, length + 1, 0), mask=inside)
    tl.store(temperatures_ptr + x, temperature, mask=inside)
    tl.store(keys_ptr + x, low | (high << 32), mask=inside)
    tl.store(draw_positions_ptr + x, length + 1, mask=inside)
    tl.store(row_ptr, length + 1, mask=real)


def decode_inputs_torch(state_RC: Tensor, rows_X: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """What ``decode_inputs`` must write, in the order of its arguments; lengths are advanced."""
    real = rows_X >= 0
    mine = state_RC[rows_X.clamp(min=0).long()].where(real.unsqueeze(1), torch.tensor(0)).long()
    length = mine[:, LENGTH]
    block = mine[:, TABLE:].gather(1, (length // block_size).unsqueeze(1)).squeeze(1)
    slot = (block * block_size + length % block_size).where(real, torch.tensor(-1))
    key = (mine[:, KEY] & 0xFFFFFFFF) | (mine[:, KEY + 1] << 32)
    temperature = mine[:, TEMPERATURE].int().view(torch.float32)
    state_RC[rows_X[real].long(), LENGTH] += 1
    read = (length + 1).where(real, torch.tensor(0)).int()
    return mine[:, TOKEN], length, slot, read, temperature, key, (length + 1).int()


def decode_inputs(
    state_RC: Tensor,
    rows_X: Tensor,
    token_ids_X: Tensor,
    positions_X: Tensor,
    slots_X: Tensor,
    lengths_X: Tensor,
    temperatures_X: Tensor,
    keys_X: Tensor,
    draw_positions_X: Tensor,
    block_size: int,
) -> None:
    """One new token for each row of ``rows_X`` (int32): which, where, and how the next is drawn.

    ``token_ids_X``, ``positions_X``, ``slots_X``, ``keys_X`` are int64, ``lengths_X`` and
    ``draw_positions_X`` int32, ``temperatures_X`` float32; all are written. ``state_RC`` is int32,
    and its lengths grow by one. No row stands twice; a row ``PADDING`` reads and writes nothing:
    slot -1, length 0.
    """
    X = len(rows_X)
    _decode_inputs_kernel[(cdiv(X, 128),)](
        state_RC,
        rows_X,
        token_ids_X,
        positions_X,
        slots_X,
        lengths_X,
        temperatures_X,
        keys_X,
        draw_positions_X,
        X,
        state_RC.stride(0),
        B=block_size,
        TABLE=TABLE,
        BLOCK=128,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["stride"])
def _step_inputs_kernel(
    state_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    given_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    stride: tl.tensor,
    B: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    s = tl.program_id(0)
    row = tl.load(rows_ptr + s).to(tl.int64)
    start = tl.load(starts_ptr + s)
    count = tl.load(starts_ptr + s + 1) - start
    first = tl.load(firsts_ptr + s)
    row_ptr = state_ptr + row * stride
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    given = tl.load(given_ptr + start + n, mask=inside, other=0)
    token = tl.where(given < 0, tl.load(row_ptr + 1), given)
    position = first + n
    block = tl.load(row_ptr + TABLE + position // B, mask=inside, other=0)
    slot = block.to(tl.int64) * B + position % B
    tl.store(token_ids_ptr + start + n, token.to(tl.int64), mask=inside)
    tl.store(positions_ptr + start + n, position.to(tl.int64), mask=inside)
    tl.store(slots_ptr + start + n, slot, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(lengths_ptr + s, first + count)
        tl.store(row_ptr, first + count)


def step_inputs(
    state_RC: Tensor,
    rows_S: Tensor,
    starts_S1: Tensor,
    firsts_S: Tensor,
    given_T: Tensor,
    token_ids_T: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    lengths_S: Tensor,
    block_size: int,
    max_new: int,
) -> None:
    """The tokens of a step of any kind: sequence s brings tokens ``starts[s]`` to ``starts[s+1]``
    of ``given_T``, at positions from ``firsts[s]`` on.

    Int32, but for ``token_ids_T``, ``positions_T`` and ``slots_T``, which are int64 and written, as
    ``lengths_S`` is: the tokens that each sequence reads. A token ``FROM_STATE`` is the one that
    the row holds. The rows' lengths become ``lengths_S``. No sequence brings more than ``max_new``.
    """
    block = 1024 if max_new > 32 else 32
    _step_inputs_kernel[(len(rows_S), cdiv(max_new, block))](
        state_RC,
        rows_S,
        starts_S1,
        firsts_S,
        given_T,
        token_ids_T,
        positions_T,
        slots_T,
        lengths_S,
        state_RC.stride(0),
        B=block_size,
        TABLE=TABLE,
        BLOCK=block,
        num_warps=4,
    )


def step_inputs_torch(
    state_RC: Tensor,
    rows_S: Tensor,
    starts_S1: Tensor,
    firsts_S: Tensor,
    given_T: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``step_inputs`` must write: tokens, positions, slots, lengths; and the rows' lengths."""
    tokens, positions, slots, lengths = [], [], [], []
    starts = starts_S1.tolist()
    for s, (row, first) in enumerate(zip(rows_S.tolist(), firsts_S.tolist(), strict=True)):
        given = given_T[starts[s] : starts[s + 1]].tolist()
        for position, token in enumerate(given, first):
            tokens.append(int(state_RC[row, TOKEN]) if token == FROM_STATE else token)
            block = int(state_RC[row, TABLE + position // block_size])
            positions.append(position)
            slots.append(block * block_size + position % block_size)
        lengths.append(first + len(given))
        state_RC[row, LENGTH] = lengths[-1]
    device = state_RC.device
    made = (torch.tensor(each, device=device) for each in (tokens, positions, slots))
    token_ids_T, positions_T, slots_T = made
    return token_ids_T, positions_T, slots_T, torch.tensor(lengths, device=device).int()
