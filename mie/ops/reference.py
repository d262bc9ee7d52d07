"""The arithmetic of the model in plain torch, in the order of the formulas: the oracle.

Invariant: every function computes in float32, rounds once at the end to the dtype it was given, and
changes none of its inputs. Whatever is fast later (a Triton kernel, a CUDA kernel, a reader's own
version) must equal these within the rounding of its dtype.

Shapes are written as suffixes, one letter a dimension:

    T  tokens computed in this step     S  tokens of context        E  model width
    H  query heads                      G  key/value heads          D  head size
    R  rotary pairs, D / 2              F  feed-forward width       N, B, M  see paged_attention
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Scale each row to a root mean square of one, then each channel by its weight.

        y = x / sqrt(mean(x²) + eps) · weight

    ``x_TE`` may have any number of leading dimensions. Zhang and Sennrich, 2019.
    """
    x = x_TE.float()
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(mean_square + eps) * weight_E.float()).to(x_TE.dtype)


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``(y_TE, sum_TE)``: the residual stream with a branch added, and the norm of that sum.

    The sum is rounded to the dtype first, and the norm reads it as it was rounded.
    """
    sum_TE = (x_TE.float() + residual_TE.float()).to(x_TE.dtype)
    return rms_norm(sum_TE, weight_E, eps), sum_TE


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turn pair i of each head, (x[i], x[i + R]), by the angle of its position and pair.

        [ a' ]   [ cos  -sin ] [ a ]
        [ b' ] = [ sin   cos ] [ b ]

    ``cos_TR`` and ``sin_TR`` are float32, one row a token: see ``mie.model.rope``. All heads
    of a token turn alike. Su et al., 2021; the pairing of halves is that of GPT-NeoX and of
    every model in Hugging Face's format.
    """
    a_THR, b_THR = x_THD.float().chunk(2, dim=-1)
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)  # one angle for all heads
    turned = torch.cat((a_THR * cos - b_THR * sin, a_THR * sin + b_THR * cos), dim=-1)
    return turned.to(x_THD.dtype)


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Let the gate decide how much of each feature passes.

        y = silu(gate) · up,   silu(g) = g / (1 + exp(-g))

    Shazeer, 2020.
    """
    gate = gate_TF.float()
    return (gate * torch.sigmoid(gate) * up_TF.float()).to(up_TF.dtype)


def attention(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float) -> Tensor:
    """Causal attention with grouped key/value heads, for one sequence.

        weights = softmax(q · kᵀ · scale), over the keys that this query may see
        out     = weights · v

    The T queries are the *last* T of the S positions: query t sees the keys 0 … S - T + t::

             keys 0 1 2 3 4          S = 5 positions in all, T = 2 of them computed now
        query 0   x x x x .
        query 1   x x x x x

    Query head h reads key/value head h // (H // G). Returns ``out_THD``.
    Vaswani et al., 2017; grouping after Ainslie et al., 2023.
    """
    T, H, D = q_THD.shape
    S, G, _ = k_SGD.shape
    J = H // G  # query heads a group; their queries are rows of one product, so K is read once
    q_GXD = q_THD.float().reshape(T, G, J, D).permute(1, 2, 0, 3).reshape(G, J * T, D)
    k_GDS = k_SGD.float().permute(1, 2, 0)
    v_GSD = v_SGD.float().permute(1, 0, 2)

    scores_GJTS = (q_GXD @ k_GDS * scale).view(G, J, T, S)
    last_visible_T1 = torch.arange(S - T, S, device=q_THD.device).unsqueeze(1)
    future_TS = torch.arange(S, device=q_THD.device) > last_visible_T1
    weights_GJTS = scores_GJTS.masked_fill(future_TS, float("-inf")).softmax(dim=-1)

    out_GXD = weights_GJTS.view(G, J * T, S) @ v_GSD
    return out_GXD.view(G, J, T, D).permute(2, 0, 1, 3).reshape(T, H, D).to(q_THD.dtype)


def paged_attention(
    q_THD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    block_table_M: Tensor,
    num_tokens: int,
    scale: float,
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor] = attention,
) -> Tensor:
    """The same attention when K and V lie scattered over blocks of B slots each.

    ``block_table_M`` names the physical block of each logical one: position p lies in block
    ``block_table_M[p // B]``, slot ``p % B``. The first ``num_tokens`` positions exist; the rest of
    the last block may hold anything. ``attention`` gets the K and V that were gathered.
    Kwon et al., 2023.
    """
    k_SGD = k_NBGD.index_select(0, block_table_M).flatten(0, 1)[:num_tokens]
    v_SGD = v_NBGD.index_select(0, block_table_M).flatten(0, 1)[:num_tokens]
    return attention(q_THD, k_SGD, v_SGD, scale)


def paged_decode(
    q_XHD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_XM: Tensor,
    lengths_X: Tensor,
    scale: float,
) -> Tensor:
    """``out_XHD``: one query for each of X sequences, over the blocks in its row of ``tables_XM``.

    Sequence x has ``lengths_X[x]`` tokens; with 0 its output is 0. Entries behind the last block
    that a sequence needs are not read. Waits for the device, which knows the lengths.
    """
    out_XHD = torch.zeros_like(q_XHD)
    for x, length in enumerate(lengths_X.tolist()):
        if length:
            table_M = tables_XM[x, : -(-length // k_NBGD.shape[1])]
            q_1HD = q_XHD[x : x + 1]
            out_XHD[x : x + 1] = paged_attention(q_1HD, k_NBGD, v_NBGD, table_M, length, scale)
    return out_XHD


def paged_prefill(
    q_THD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_SM: Tensor,
    starts_S1: Tensor,
    lengths_S: Tensor,
    scale: float,
) -> Tensor:
    """``paged_attention`` for the new tokens of S sequences, which stand in one row.

    Sequence s brings the queries ``starts_S1[s]`` to ``starts_S1[s + 1]``, the last of its
    ``lengths_S[s]`` positions, and its blocks are row s of ``tables_SM``. It may bring none. Rows
    behind ``starts_S1[S]`` are of nobody and come out as 0.
    """
    out_THD = torch.zeros_like(q_THD)
    starts, lengths = starts_S1.tolist(), lengths_S.tolist()
    for table_M, start, end, length in zip(
        tables_SM, starts[:-1], starts[1:], lengths, strict=True
    ):
        if end > start:
            blocks_M = table_M[: -(-length // k_NBGD.shape[1])]
            out_THD[start:end] = paged_attention(
                q_THD[start:end], k_NBGD, v_NBGD, blocks_M, length, scale
            )
    return out_THD
