"""The same arithmetic in few calls of torch: what the engine runs where nothing faster is written.

Invariant: every function equals its namesake in ``mie.ops.reference`` within the rounding of its
dtype, and reads nothing that the reference would not. A slot of a block behind the last token, or
of a block that nobody owns, may hold NaN or infinity; neither reaches a result.

Why: a call of torch takes 2 to 5 µs before it computes anything, and one token of a small model is
little to compute. The reference spells a formula out in five to fifteen calls, sixty times a step.

Shapes as in ``mie.ops.reference``, and

    X  sequences that decode: one new token each     J  query heads a group, H / G
    N  blocks    B  slots a block    M  blocks of a table    S  the longest context of a group
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

# How much padding one group of decodes may carry, in tokens: to read so many costs about what the
# calls of one more group cost, and a GPU reads a thousand times faster than it is called.
MOST_PADDING = {"cpu": 256, "cuda": 32_768}
# How many tokens one group may gather. K and V should still be in the cache of a CPU when they are
# read again; on a GPU they only have to fit.
MOST_GATHERED = {"cpu": 8_192, "cuda": 131_072}


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """As ``reference.rms_norm``: torch has it, and computes it in float32 too."""
    return functional.rms_norm(x_TE, weight_E.shape, weight_E, eps)


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """As ``reference.rope``, with the second product of each half added as it is made."""
    a_THR, b_THR = x_THD.float().chunk(2, dim=-1)
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    turned_a = torch.addcmul(a_THR * cos, b_THR, sin, value=-1)
    turned_b = torch.addcmul(b_THR * cos, a_THR, sin)
    return torch.cat((turned_a, turned_b), dim=-1).to(x_THD.dtype)


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """As ``reference.swiglu``. Below float32 the gate is rounded once more before the product."""
    return functional.silu(gate_TF).mul_(up_TF)


def attention(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float) -> Tensor:
    """As ``reference.attention``: the T queries are the last T of the S positions."""
    T, S = len(q_THD), len(k_SGD)
    q_1HTD, k_1GSD, v_1GSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SGD, v_SGD))
    if T == 1:
        return _attend_one(q_THD, k_1GSD, v_1GSD, None, scale)
    visible_TS = None
    if T < S:
        visible_TS = torch.ones(T, S, dtype=torch.bool, device=q_THD.device).tril_(S - T)
    out_1HTD = functional.scaled_dot_product_attention(
        q_1HTD, k_1GSD, v_1GSD, visible_TS, is_causal=T == S, scale=scale, enable_gqa=True
    )
    return out_1HTD.squeeze(0).transpose(0, 1)


def _attend_one(
    q_XHD: Tensor, k_XGSD: Tensor, v_XGSD: Tensor, mask_X11S: Tensor | None, scale: float
) -> Tensor:
    """One query a sequence; ``mask_X11S`` is added to the scores."""
    X, H, D = q_XHD.shape
    G = k_XGSD.shape[1]
    # The heads of a group ask the same keys. As rows of one product they read them once; in
    # float32 on a CPU, where one row is a plain dot product, they are faster one by one.
    alone = q_XHD.dtype == torch.float32 and q_XHD.device.type == "cpu"
    rows = (X, H, 1, D) if alone else (X, G, H // G, D)
    out = functional.scaled_dot_product_attention(
        q_XHD.reshape(rows), k_XGSD, v_XGSD, mask_X11S, scale=scale, enable_gqa=alone
    )
    return out.reshape(X, H, D)


class PagedDecode:
    """Attention of X sequences that bring one new token each, in a few calls for all of them.

    Made once a step, called once a layer: everything that depends on tables and lengths alone is
    prepared here, as FlashInfer plans before it runs (Ye et al., 2025).

    Sequences of about the same length form a group and are padded to its longest; what a group
    reads in vain is at most ``MOST_PADDING`` tokens, whatever the lengths.
    """

    def __init__(
        self,
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        kv_2NBGD: Tensor,
    ) -> None:
        """``block_tables``: the physical blocks of each sequence. ``num_tokens``: how many tokens
        each reads. ``kv_2NBGD``: K and V of any layer, for their shape, dtype and device."""
        groups = group_by_length(num_tokens, kv_2NBGD.device.type)
        sizes = [len(rows) * _width(rows, num_tokens, kv_2NBGD.shape[2]) for rows in groups]
        room = kv_2NBGD.new_empty(2 * max(sizes), *kv_2NBGD.shape[2:])
        self.groups = [
            _Group(
                [block_tables[row] for row in rows],
                [num_tokens[row] for row in rows],
                kv_2NBGD,
                room,
            )
            for rows in groups
        ]
        self.rows: list[Tensor] | None = None
        if len(groups) > 1:
            self.rows = [torch.tensor(rows, device=kv_2NBGD.device) for rows in groups]

    def __call__(self, q_XHD: Tensor, kv_2NBGD: Tensor, scale: float) -> Tensor:
        """``out_XHD`` over the K and V of one layer."""
        if self.rows is None:
            return self.groups[0].attend(q_XHD, kv_2NBGD, scale)
        out_XHD = torch.empty_like(q_XHD)
        for rows, group in zip(self.rows, self.groups, strict=True):
            out = group.attend(q_XHD.index_select(0, rows), kv_2NBGD, scale)
            out_XHD.index_copy_(0, rows, out)
        return out_XHD


class _Group:
    """Sequences that are padded to the longest of them.

    ::

        length 6    blocks 4 1    a a a a | a a . .        ``.`` is stale: zeroed after the gather,
        length 3    blocks 2 2    b b b . | . . . .        since 0 · NaN would be NaN
                                            ^ S = 6        and masked; nothing behind S is read
    """

    def __init__(
        self,
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        kv_2NBGD: Tensor,
        room: Tensor,
    ) -> None:
        _, N, B, G, D = kv_2NBGD.shape
        X, self.longest = len(num_tokens), max(num_tokens)
        M = -(-self.longest // B)
        padded = [[*table[:M], *[table[-1]] * (M - len(table))] for table in block_tables]
        tables_XM = torch.tensor(padded, device=kv_2NBGD.device)
        # K and V as 2N blocks in a row: one gather for both.
        self.blocks = torch.stack((tables_XM, tables_XM + N)).flatten()
        self.gathered = room[: 2 * X * M].view(2 * X * M, B * G * D)
        self.tokens = self.gathered.view(2 * X * M * B, G * D)
        kv_2XSGD = self.gathered.view(2, X, M * B, G, D)[:, :, : self.longest]
        self.k_XGSD, self.v_XGSD = kv_2XSGD.transpose(2, 3).unbind()
        self.mask_X11S: Tensor | None = None
        if min(num_tokens) < self.longest:
            positions_S = torch.arange(M * B, device=kv_2NBGD.device)
            lengths_X1 = torch.tensor(num_tokens, device=kv_2NBGD.device).unsqueeze(1)
            stale_XS = positions_S >= lengths_X1
            self.stale = torch.stack((stale_XS, stale_XS)).flatten().nonzero().squeeze(1)
            mask_XS = torch.zeros(X, self.longest, dtype=room.dtype, device=room.device)
            mask_XS.masked_fill_(stale_XS[:, : self.longest], float("-inf"))
            self.mask_X11S = mask_XS.view(X, 1, 1, self.longest)

    def attend(self, q_XHD: Tensor, kv_2NBGD: Tensor, scale: float) -> Tensor:
        blocks = kv_2NBGD.view(-1, self.gathered.shape[1])
        torch.index_select(blocks, 0, self.blocks, out=self.gathered)
        if self.mask_X11S is not None:
            self.tokens.index_fill_(0, self.stale, 0)
        return _attend_one(q_XHD, self.k_XGSD, self.v_XGSD, self.mask_X11S, scale)


def group_by_length(num_tokens: Sequence[int], device_type: str = "cpu") -> list[list[int]]:
    """The indices of ``num_tokens`` in groups, of which each wastes at most ``MOST_PADDING``.

    From the longest down, a sequence joins the group if the padding allows it, and if the group
    stays within ``MOST_GATHERED``. Indices ascend within a group.
    """
    most_padding = MOST_PADDING.get(device_type, MOST_PADDING["cuda"])
    most_gathered = MOST_GATHERED.get(device_type, MOST_GATHERED["cuda"])
    groups: list[list[int]] = []
    longest = padding = 0
    for index in sorted(range(len(num_tokens)), key=lambda index: -num_tokens[index]):
        padding += longest - num_tokens[index]
        fits = groups and (len(groups[-1]) + 1) * longest <= most_gathered
        if not fits or padding > most_padding:
            groups.append([])
            longest, padding = num_tokens[index], 0
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def _width(rows: Sequence[int], num_tokens: Sequence[int], block_size: int) -> int:
    """Blocks of the longest of ``rows``."""
    return -(-max(num_tokens[row] for row in rows) // block_size)
