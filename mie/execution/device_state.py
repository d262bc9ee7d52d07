"""What the device knows of each sequence, and what it has to be told before a step.

Invariant: ``Row`` says exactly what stands in a row of the device's table once all steps that were
launched have run. So a plan is compared with it, and only what differs is sent. While sequences
decode, length and last token advance on the device by themselves; then what differs is a block in
every ``block_size``-th step, and in most steps nothing.

    plan 8    a[41] blocks 7 2 9     b[16] blocks 4 5      c[0:64] blocks 1 3 6 8
    rows      0: 41 tokens, 7 2 9    1: 16 tokens, 4       (unknown)
    writes                           (1, TABLE + 1, 5)     all of row 2

The scheduler is not asked, and does not say, when a sequence has gone: a row that no recent plan
names is given to the next one that needs a row. After the model runner V2 of vLLM.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from mie.sampling_params import Draw, mix
from mie.scheduling.plan import PENDING, ScheduledSequence

LENGTH, TOKEN, TEMPERATURE, KEY, TABLE = 0, 1, 2, 3, 8  # as in mie.kernels.inputs
LARGEST = 3e38  # that a float32 holds
PADDING = -1  # in place of a row, or of a slot: nobody's
UNKNOWN = -1


@dataclass
class Row:
    """The row ``number`` of the table: ``num_tokens`` have K and V, in ``blocks``.

    ``has_token``: whether the next token stands there; the device chose it, or was told.
    ``last_step``: the number of the step that used it last.
    """

    number: int
    blocks: tuple[int, ...] = ()
    num_tokens: int = UNKNOWN
    has_token: bool = False
    draw: tuple[float, int, int] | None = None  # temperature, seed, index of the answer
    last_step: int = 0


class DeviceState:
    """Rows for ``num_rows`` sequences. ``in_flight`` steps can be out at once: a row is free when
    none of them uses it."""

    def __init__(self, num_rows: int, in_flight: int) -> None:
        self.num_rows = num_rows
        self.in_flight = in_flight
        self._step = 0
        self._rows: dict[int, Row] = {}  # by sequence id
        self._free = list(reversed(range(num_rows)))
        self.writes: list[tuple[int, int, int]] = []  # row, column, value

    def forget(self) -> None:
        """Nobody knows what the device has: a step broke off. Every row is told anew."""
        self._rows.clear()
        self._free = list(reversed(range(self.num_rows)))
        self.writes.clear()

    def take_writes(self) -> list[tuple[int, int, int]]:
        """What the device has to be told before the step."""
        writes, self.writes = self.writes, []
        return writes

    def step(self, scheduled: Iterable[ScheduledSequence]) -> list[int]:
        """The rows of the sequences of the next step, in order. ``writes`` bring them up to date;
        afterwards each row is as the step leaves it."""
        self._step += 1
        numbers = []
        rows, step = self._rows, self._step
        for s in scheduled:
            row = rows.get(s.sequence_id) or self._new_row(s.sequence_id)
            row.last_step = step
            if row.blocks != s.blocks:
                self._tell_blocks(row, s.blocks)
            if row.num_tokens != s.position:
                self._tell(row, LENGTH, s.position)
            self._check_token(row, s)
            row.num_tokens = s.position + len(s.token_ids)
            row.has_token = bool(s.draws)
            if s.draws:
                draw = s.draws[0]
                if row.draw != (draw.temperature, draw.seed, draw.index):
                    self._tell_draw(row, draw)
            numbers.append(row.number)
        return numbers

    def _check_token(self, row: Row, s: ScheduledSequence) -> None:
        """The first token of ``s`` is in the row, unless the plan brings it along."""
        if s.token_ids[0] == PENDING:
            known = row.has_token and row.num_tokens == s.position
            assert known, f"{s}: its token is neither in the plan nor on the device"
        elif not row.has_token or row.num_tokens != s.position:
            self._tell(row, TOKEN, s.token_ids[0])

    def _new_row(self, sequence_id: int) -> Row:
        if not self._free:
            self._collect()
        assert self._free, f"{self.num_rows} rows, and all of them in steps that are out"
        row = self._rows[sequence_id] = Row(self._free.pop())
        return row

    def _collect(self) -> None:
        """Take back the rows that no step uses which may be out."""
        gone = [i for i, row in self._rows.items() if row.last_step <= self._step - self.in_flight]
        for sequence_id in gone:
            self._free.append(self._rows.pop(sequence_id).number)

    def _tell(self, row: Row, column: int, value: int) -> None:
        self.writes.append((row.number, column, value))

    def _tell_blocks(self, row: Row, blocks: tuple[int, ...]) -> None:
        old, number = row.blocks, row.number
        same = len(old)
        if blocks[:same] == old:  # it has grown at its end
            self.writes += [(number, TABLE + at, blocks[at]) for at in range(same, len(blocks))]
        else:
            self.writes += [
                (number, TABLE + at, block)
                for at, block in enumerate(blocks)
                if at >= same or old[at] != block
            ]
        row.blocks = blocks

    def _tell_draw(self, row: Row, draw: Draw) -> None:
        temperature, low, high = draw_words(draw)
        self._tell(row, TEMPERATURE, temperature)
        self._tell(row, KEY, low)
        self._tell(row, KEY + 1, high)
        row.draw = draw.temperature, draw.seed, draw.index


def draw_words(draw: Draw) -> tuple[int, int, int]:
    """Temperature and key of a draw as three int32: the bits of the one, low and high word of the
    other. What depends on the position is added on the device."""
    temperature_32 = struct.pack("<f", min(draw.temperature, LARGEST))  # beyond it, all are alike
    (temperature,) = struct.unpack("<i", temperature_32)
    low, high = struct.unpack("<ii", struct.pack("<q", mix(draw.seed, draw.index)))
    return temperature, low, high
