"""The next token of each sequence, chosen on the device: one read of the logits, one number out.

Invariant: a token is a function of its row of logits, its temperature, its key and its position.
Of equal scores the lowest token wins, and a score that is no number never does, so that a token is
always one of the vocabulary: 0 where a row holds nothing above minus infinity.

    score[v] = logits[v] / temperature - log(-log(u[v]))      u of (key, position, v): philox.py

The largest score belongs to token v with probability softmax(logits / temperature)[v]: there is
nothing to add up, to sort or to divide by. After Maddison, Tarlow and Minka, 2014. Temperature 0
takes the largest logit; such a row computes no noise.

A row is cut into chunks, so that one sequence alone occupies the whole GPU::

    logits   | chunk 0 | chunk 1 | chunk 2 | .. |     a program each, which walks through its tiles
    stage 1      |         |         |              best score and its token, a pair a chunk
    stage 2      └────┬────┴─────────┘
                    token ──> tokens_S[s], and last_token_R[rows_S[s]] for the next step

Two launches need no memory that outlives them. The alternative is one launch with a counter of
arrivals for each row, whose last program reduces the pairs: a state that no two streams may share.

Cost: 4 bytes a logit are read once, 622 MB for 1,024 rows of 151,936. Temporary memory is 8 bytes a
chunk. Noise takes about 75 instructions a token, two thirds of them for the logarithms, whose
digits must all be right where u is almost 1. For large batches of drawn rows it outweighs reading.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import cdiv, next_power_of_2
from mie.kernels.philox import gumbel, philox_uniforms

QUADS = 256  # counters a tile, of four tokens each
PROGRAMS = 2_048  # that a GPU is given at most, if every row takes one: 16 for each of its cores
NO_TOKEN = tl.constexpr(2**31 - 1)


def sample_torch(
    logits_SV: Tensor, temperatures_S: Tensor, keys_S: Tensor, positions_S: Tensor
) -> Tensor:
    """What ``sample`` must equal, but where two scores are equal within rounding."""
    uniform_SV = philox_uniforms(
        keys_S.tolist(), positions_S.tolist(), logits_SV.shape[1], logits_SV.device
    )
    temperatures_S1 = temperatures_S.unsqueeze(1)
    drawn_SV = logits_SV / temperatures_S1 + gumbel(uniform_SV)
    scores_SV = torch.where(temperatures_S1 > 0, drawn_SV, logits_SV)
    return torch.where(scores_SV.isnan(), -torch.inf, scores_SV).argmax(dim=-1)


@triton.jit
def _uniform(word: tl.tensor) -> tl.tensor:
    """The bits of ``philox_uniform``. As the fraction of a float in [1, 2) they need no conversion,
    and the subtraction is exact."""
    in_1_to_2 = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return in_1_to_2 - (1.0 - 2.0**-24)


@triton.jit
def _uniforms(
    key: tl.tensor, position: tl.tensor, quad: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Those of tokens 4 * quad to 4 * quad + 3, each of the shape of ``quad``."""
    word_0, word_1, word_2, word_3 = tl.philox(key, quad, position, 0, 0)
    return _uniform(word_0), _uniform(word_1), _uniform(word_2), _uniform(word_3)


@triton.jit
def _noisy(logits: tl.tensor, inverse: tl.tensor, uniform: tl.tensor) -> tl.tensor:
    """logits / temperature - log(-log(u))."""
    return logits * inverse - tl.log(-tl.log(uniform))


@triton.jit
def _better(
    best: tl.tensor, token: tl.tensor, score: tl.tensor, candidate: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The pair with the larger score. Candidates come in ascending order: the first one stays.
    A comparison with NaN is false."""
    larger = score > best
    return tl.where(larger, score, best), tl.where(larger, candidate, token)


@triton.jit
def _first_of_the_best(scores: tl.tensor, tokens: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest of ``scores``, and the lowest of the ``tokens`` that have it."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, NO_TOKEN), axis=0)


@triton.jit(do_not_specialize=["tiles"])
def _chunk_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    temperatures_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    best_ptr: tl.tensor,  # [S, chunks]
    token_ptr: tl.tensor,  # [S, chunks]
    V: tl.tensor,
    tiles: tl.tensor,  # that a chunk consists of
    QUADS: tl.constexpr,
) -> None:
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits_ptr += row.to(tl.int64) * logits_stride
    temperature = tl.load(temperatures_ptr + row)
    inverse = tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))
    key = tl.load(keys_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int32)
    best = tl.full([QUADS], float("-inf"), tl.float32)
    token = tl.full([QUADS], NO_TOKEN, tl.int32)
    for tile in range(tiles):
        quad = (chunk * tiles + tile) * QUADS + tl.arange(0, QUADS)
        v = 4 * quad[:, None] + tl.arange(0, 4)[None, :]
        logits = tl.load(logits_ptr + v, mask=v < V, other=float("-inf"))
        even, odd = tl.split(tl.reshape(logits, [QUADS, 2, 2]))
        score_0, score_2 = tl.split(even)
        score_1, score_3 = tl.split(odd)
        if temperature > 0:
            u_0, u_1, u_2, u_3 = _uniforms(key, position, quad)
            score_0, score_1 = _noisy(score_0, inverse, u_0), _noisy(score_1, inverse, u_1)
            score_2, score_3 = _noisy(score_2, inverse, u_2), _noisy(score_3, inverse, u_3)
        best, token = _better(best, token, score_0, 4 * quad)
        best, token = _better(best, token, score_1, 4 * quad + 1)
        best, token = _better(best, token, score_2, 4 * quad + 2)
        best, token = _better(best, token, score_3, 4 * quad + 3)
    best_of_all, first = _first_of_the_best(best, token)
    tl.store(best_ptr + row * chunks + chunk, best_of_all)
    tl.store(token_ptr + row * chunks + chunk, first)


@triton.jit(do_not_specialize=["last_token_stride", "chunks"])
def _choose_kernel(
    best_ptr: tl.tensor,  # [S, chunks]
    token_ptr: tl.tensor,  # [S, chunks]
    out_ptr: tl.tensor,
    last_token_ptr: tl.tensor,  # or None
    last_token_stride: tl.tensor,
    rows_ptr: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    token = tl.load(token_ptr + row * chunks + chunk, mask=chunk < chunks, other=NO_TOKEN)
    _, first = _first_of_the_best(best, token)
    chosen = tl.where(first == NO_TOKEN, 0, first).to(tl.int64)
    tl.store(out_ptr + row, chosen)
    if last_token_ptr is not None:
        target = tl.load(rows_ptr + row)
        target_ptr = last_token_ptr + target.to(tl.int64) * last_token_stride
        tl.store(target_ptr, chosen.to(last_token_ptr.dtype.element_ty), mask=target >= 0)


def sample(
    logits_SV: Tensor,
    temperatures_S: Tensor,
    keys_S: Tensor,
    positions_S: Tensor,
    out_S: Tensor | None = None,
    *,
    last_token_R: Tensor | None = None,
    rows_S: Tensor | None = None,
) -> Tensor:
    """``tokens_S``, int64: a token for each row of ``logits_SV``, float32.

    ``temperatures_S`` is float32; 0 is greedy. ``keys_S``, int64, and ``positions_S``, int32 or
    int64, name the noise of each draw. With ``last_token_R``, whole numbers at any stride, and
    ``rows_S``, int32 or int64, a token is also stored at ``last_token_R[rows_S[s]]``, unless
    ``rows_S[s]`` is negative. Rows that are equal and not negative would race.

    Raises ValueError for tensors that do not fit each other.
    """
    S, V = logits_SV.shape
    if logits_SV.dtype != torch.float32 or logits_SV.stride(1) != 1:
        raise ValueError(
            f"logits are {logits_SV.dtype} with strides {logits_SV.stride()}; "
            "float32 with rows in one piece are needed"
        )
    if out_S is None:
        out_S = torch.empty(S, dtype=torch.int64, device=logits_SV.device)
    wholes = (torch.int64, torch.int32)
    _check("temperatures", temperatures_S, S, torch.float32)
    _check("keys", keys_S, S, torch.int64)
    _check("positions", positions_S, S, *wholes)
    _check("out", out_S, S, torch.int64)
    if (last_token_R is None) != (rows_S is None):
        given, missing = ("rows", "last_token") if last_token_R is None else ("last_token", "rows")
        raise ValueError(f"{given} without {missing}")
    if last_token_R is not None and rows_S is not None:
        if last_token_R.dtype not in wholes or last_token_R.dim() != 1:
            raise ValueError(
                f"last_token is {last_token_R.dtype} {tuple(last_token_R.shape)}; "
                "a vector of int64 or int32 is needed"
            )
        _check("rows", rows_S, S, *wholes)
    if S == 0:
        return out_S
    tiles, chunks = divide(S, V)
    best_SC = torch.empty(S, chunks, dtype=torch.float32, device=logits_SV.device)
    token_SC = torch.empty(S, chunks, dtype=torch.int32, device=logits_SV.device)
    _chunk_kernel[(S, chunks)](
        logits_SV,
        logits_SV.stride(0),
        temperatures_S,
        keys_S,
        positions_S,
        best_SC,
        token_SC,
        V,
        tiles,
        QUADS=QUADS,
    )
    _choose_kernel[(S,)](
        best_SC,
        token_SC,
        out_S,
        last_token_R,
        0 if last_token_R is None else last_token_R.stride(0),
        rows_S,
        chunks,
        CHUNKS=next_power_of_2(cdiv(V, 4 * QUADS)),  # one kernel for all S
        num_warps=1,
    )
    return out_S


def divide(num_rows: int, vocabulary: int) -> tuple[int, int]:
    """(tiles a chunk, chunks a row): about ``PROGRAMS`` programs, and no chunk without a token."""
    tiles_a_row = cdiv(vocabulary, 4 * QUADS)
    tiles = cdiv(tiles_a_row, max(1, PROGRAMS // num_rows))
    return tiles, cdiv(tiles_a_row, tiles)


def _check(name: str, tensor: Tensor, length: int, *dtypes: torch.dtype) -> None:
    """One number for each row, in one piece."""
    if tensor.dtype not in dtypes or tensor.shape != (length,) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} are {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
            f"{' or '.join(map(str, dtypes))} {(length,)} in one piece are needed"
        )
