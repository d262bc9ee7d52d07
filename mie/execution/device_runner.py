"""Carry out plans on a device that works by itself: launch, and come back for the tokens later.

Invariant: a launch waits for nothing that the device computes, and the device for nothing that the
host will say: what a step needs of the step before it is in the device's own table. Steps run in
the order in which they are launched. Only blocks that move to the host or back are waited for.

    launch(plan)    tell the device what differs  ──►  writes, rows
                    blocks move                        out, copies, in
                    every sequence one new token?
                      yes   replay a recorded step     decode_inputs, forward, sample
                      no    launch it piece by piece   step_inputs, forward, sample
                    begin to fetch the tokens     ◄──  tokens
    result()        wait for them

A step with a chunk of a prompt in it is rare and long; it is launched operation by operation, and
decodes and chunks share each launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mie.execution.compile_ahead import compile_ahead
from mie.execution.cuda_graphs import DecodeGraphs, batch_sizes
from mie.execution.device_state import PADDING, TABLE, TOKEN, DeviceState, draw_words
from mie.execution.fused_forward import FusedForward
from mie.execution.kv_cache import PagedKVCache
from mie.execution.overlap import Download, Downloads, Uploads
from mie.execution.skinny_forward import FEW, MOST_ROWS, SkinnyForward, can_be_skinny
from mie.execution.swap_space import SwapSpace
from mie.model.decoder import Decoder
from mie.ops.fast import FastOps
from mie.scheduling.limits import Limits
from mie.scheduling.plan import ScheduledSequence, StepPlan, StepResult

WRITES_AT_ONCE = 65_536


class DeviceRunner:
    """``decoder`` on the blocks of ``cache``, with ``num_host_blocks`` in the host's memory.

    ``graphs``: record decode steps when ``capture`` is called. ``in_flight`` steps may be out.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        limits: Limits,
        num_host_blocks: int,
        ops: FastOps,
        *,
        in_flight: int = 2,
    ) -> None:
        self.decoder, self.cache, self.ops, self.limits = decoder, cache, ops, limits
        self.swap_space = SwapSpace(cache, num_host_blocks)
        whole = decoder, cache, ops, limits.max_model_len
        self.forward = FusedForward(*whole)
        self.skinny = SkinnyForward(*whole) if can_be_skinny(self.forward) else self.forward
        num_rows = in_flight * limits.max_num_seqs
        self.state = DeviceState(num_rows, in_flight)
        device, width = decoder.device, -(-limits.max_model_len // cache.block_size)
        self.state_RC = torch.zeros(num_rows, TABLE + width, dtype=torch.int32, device=device)
        self.tables_RM = self.state_RC[:, TABLE:]
        config = decoder.config
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.attention_scale
        shape = *heads, cache.block_size, device, decoder.dtype
        self.plan = ops.decode_plan(limits.max_num_seqs, *shape)
        self.plan_of_few = ops.decode_plan(min(FEW, limits.max_num_seqs), *shape)
        capacity = limits.token_budget + 12 * limits.max_num_seqs + 3 * WRITES_AT_ONCE
        self.uploads = Uploads(capacity, device, in_flight + 1)
        self.downloads = Downloads(limits.max_num_seqs, device, in_flight + 1)
        self.graphs = DecodeGraphs(self._decode, batch_sizes(limits.max_num_seqs))
        self.rows: list[int] = []  # of the last decode step, padding included
        self._buffers(limits.max_num_seqs)

    def _buffers(self, most: int) -> None:
        """What recorded steps read and write, at addresses that stay."""

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(most, dtype=dtype, device=self.decoder.device)

        self.rows_X = torch.full_like(zeros(torch.int32), PADDING)
        self.token_ids_X, self.positions_X, self.slots_X, self.keys_X, self.tokens_X = (
            zeros(torch.int64) for _ in range(5)
        )
        self.lengths_X, self.draw_positions_X = zeros(torch.int32), zeros(torch.int32)
        self.temperatures_X = zeros(torch.float32)

    # -- a step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Launch ``plan`` and wait for its tokens."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceStep:
        """Begin a step. Whatever breaks off here, the next step tells the device everything."""
        try:
            self._move_blocks(plan)
            if not plan.scheduled:
                return DeviceStep(plan, None)
            rows = self.state.step(plan.scheduled)
            self._write_state(self.state.take_writes())
            tokens_S: Tensor | None
            if size := self._graph_size(plan):
                tokens_S = self._replay(rows, size)
            else:
                tokens_S = self._mixed(plan, rows)
            return DeviceStep(plan, None if tokens_S is None else self.downloads.fetch(tokens_S))
        except BaseException:
            self.state.forget()
            self.rows = []
            raise

    def _move_blocks(self, plan: StepPlan) -> None:
        self.swap_space.move_out(plan.swap_out)
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            for at in range(0, len(sources), WRITES_AT_ONCE):
                part = slice(at, at + WRITES_AT_ONCE)
                self.ops.copy_blocks(
                    self.cache.kv_L2NBGD, *self.uploads.send([sources[part], targets[part]])
                )
        self.swap_space.move_in(plan.swap_in)

    def _write_state(self, writes: Sequence[tuple[int, int, int]]) -> None:
        for at in range(0, len(writes), WRITES_AT_ONCE):
            writes_3U = np.array(writes[at : at + WRITES_AT_ONCE], dtype=np.int32).T
            (sent,) = self.uploads.send([writes_3U.ravel()])
            self.ops.write_state(self.state_RC, sent.view(3, -1))

    def _graph_size(self, plan: StepPlan) -> int | None:
        """The size to replay; None for a step that brings more than a token a sequence, or chooses
        another number of tokens."""
        for scheduled in plan.scheduled:
            if len(scheduled.token_ids) != 1 or len(scheduled.draws) != 1:
                return None
        return None if plan.num_padding else self.graphs.size_for(len(plan.scheduled))

    # -- one new token for each ------------------------------------------------------------------

    def _replay(self, rows: list[int], size: int) -> Tensor:
        padded = rows + [PADDING] * (size - len(rows))
        if padded != self.rows:
            (sent,) = self.uploads.send([padded])
            self.rows_X[:size].copy_(sent)
            self.rows = padded
        self.graphs.replay(size)
        return self.tokens_X[: len(rows)]

    def _decode(self, size: int) -> None:
        """What is recorded. All addresses and all launches depend on ``size`` alone."""
        rows_X, lengths_X = self.rows_X[:size], self.lengths_X[:size]
        token_ids_X, positions_X = self.token_ids_X[:size], self.positions_X[:size]
        draw = self.temperatures_X[:size], self.keys_X[:size], self.draw_positions_X[:size]
        slots_X = self.slots_X[:size]
        self.ops.decode_inputs(
            self.state_RC,
            rows_X,
            token_ids_X,
            positions_X,
            slots_X,
            lengths_X,
            *draw,
            self.cache.block_size,
        )
        plan = self.plan_of_few if size <= FEW else self.plan
        plan.update(lengths_X)

        def attend(layer: int, q_XHD: Tensor) -> Tensor:
            return self.ops.paged_decode(
                q_XHD,
                *self.cache.layers[layer],
                self.tables_RM,
                rows_X,
                lengths_X,
                self.scale,
                plan,
            )

        forward = self.skinny if size <= MOST_ROWS else self.forward
        hidden_XE = forward(token_ids_X, positions_X, slots_X, attend)
        self._sample(hidden_XE, draw, rows_X, self.tokens_X[:size])

    def _sample(self, hidden_SE: Tensor, draw: Any, rows_S: Tensor, out_S: Tensor) -> None:
        self.ops.sample(
            self.decoder.logits(hidden_SE),
            *draw,
            out_S,
            last_token_R=self.state_RC[:, TOKEN],
            rows_S=rows_S,
        )

    def capture(self) -> None:
        """Compile all kernels, then record decode steps. All rows in them are padding."""
        compile_ahead(self)
        self.state.forget()
        self.rows_X.fill_(PADDING)
        self.rows = []
        with torch.inference_mode():
            self.graphs.capture()

    # -- any step --------------------------------------------------------------------------------

    def _mixed(self, plan: StepPlan, rows: list[int]) -> Tensor | None:
        """Chunks and decodes in the same launches. Returns the tokens, one for each draw."""
        scheduled = plan.scheduled
        counts = [len(s.token_ids) for s in scheduled]
        starts = [0, *accumulate(counts)]
        T, most = starts[-1], max(counts)
        draws = Draws.of(scheduled, starts, rows)
        rows_S, starts_S1, firsts_S, given_T, *drawn = self.uploads.send(
            [
                rows,
                starts,
                [s.position for s in scheduled],
                np.fromiter(chain.from_iterable(s.token_ids for s in scheduled), np.int32, T),
                *draws,
            ]
        )
        token_ids_T, positions_T, slots_T = self._tokens(T + plan.num_padding)
        lengths_S = torch.empty_like(rows_S)
        self.ops.step_inputs(
            self.state_RC,
            rows_S,
            starts_S1,
            firsts_S,
            given_T,
            token_ids_T[:T],
            positions_T[:T],
            slots_T[:T],
            lengths_S,
            self.cache.block_size,
            most,
        )

        def attend(layer: int, q_THD: Tensor) -> Tensor:
            return self.ops.paged_prefill(
                q_THD,
                *self.cache.layers[layer],
                self.tables_RM,
                rows_S,
                starts_S1,
                lengths_S,
                self.scale,
                most,
            )

        hidden_TE = self.forward(token_ids_T, positions_T, slots_T, attend)
        if not draws.at:
            return None
        at_D, rows_D, positions_D, temperatures_D, keys_2D = drawn
        draw = temperatures_D.view(torch.float32), keys_2D.view(torch.int64), positions_D
        tokens_D = torch.empty(len(at_D), dtype=torch.int64, device=self.decoder.device)
        self._sample(hidden_TE.index_select(0, at_D), draw, rows_D, tokens_D)
        return tokens_D

    def _tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for tokens, positions and slots; what is not written is padding: slot -1."""
        shape = 3, count + count % 2  # each begins at an address that 16 divides
        tokens_3T = torch.zeros(shape, dtype=torch.int64, device=self.decoder.device)[:, :count]
        tokens_3T[2].fill_(PADDING)
        return tokens_3T[0], tokens_3T[1], tokens_3T[2]

    def close(self) -> None:
        """Give up what points into other memory; the runner can still be used, without graphs."""
        self.graphs.close()


class Draws(NamedTuple):
    """The tokens that a step chooses, five numbers each: the row of hidden states ``at`` which it
    is chosen, the row of the table that remembers it (or none: a twin that waits for the first),
    its position, the bits of its temperature, and both halves of its key."""

    at: list[int]
    rows: list[int]
    positions: list[int]
    temperatures: list[int]
    keys: list[int]

    @classmethod
    def of(
        cls, scheduled: Sequence[ScheduledSequence], starts: Sequence[int], rows: Sequence[int]
    ) -> Draws:
        made = cls([], [], [], [], [])
        for s, end, row in zip(scheduled, starts[1:], rows, strict=True):
            for number, draw in enumerate(s.draws):
                temperature, low, high = draw_words(draw)
                made.at.append(end - 1)
                made.rows.append(PADDING if number else row)
                made.positions.append(draw.position)
                made.temperatures.append(temperature)
                made.keys.extend((low, high))
        return made


class DeviceStep:
    """A step that has been launched."""

    def __init__(self, plan: StepPlan, download: Download | None) -> None:
        self.plan, self.download = plan, download

    def result(self) -> StepResult:
        """Wait for its tokens. To be called before the step after the next is launched."""
        if self.download is None:
            return StepResult()
        tokens = iter(self.download.tokens())
        return StepResult(
            {
                s.sequence_id: tuple(islice(tokens, len(s.draws)))
                for s in self.plan.scheduled
                if s.draws
            }
        )
