"""What crosses between a CPU and a device that is behind it: numbers up, tokens down, no waiting.

Invariant: a buffer on the host is used again only when the copy from it or to it has been made.
There are so many that in an engine that runs this has always happened long ago. All of them are
pinned, and made once: to pin memory stops the device.

    CPU     fill 0 | launch | fill 1 | launch | read 0 | fill 2 | launch | read 1 | fill 0 ...
    GPU              up 0, step, down 0         up 1, step, down 1         up 2, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Uploads:
    """int32 numbers to the device: ``send`` returns them there, until the next ``send``."""

    def __init__(self, capacity: int, device: torch.device, buffers: int) -> None:
        self._device = device
        self._done = [_Event(device) for _ in range(buffers)]
        self._next = 0
        self._make_room(capacity)

    def _make_room(self, capacity: int) -> None:
        """At the start; and for a step beyond all limits, as the wave of a static batch can be."""
        for done in self._done:
            done.wait()
        pinned, buffers = self._device.type == "cuda", len(self._done)
        self.capacity = capacity
        self._device_C = torch.empty(capacity, dtype=torch.int32, device=self._device)
        self._host = [
            torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(buffers)
        ]
        self._arrays = [buffer.numpy() for buffer in self._host]

    def send(self, parts: Sequence[Sequence[int] | np.ndarray]) -> list[Tensor]:
        """Each part on the device, at an address that 16 divides: kernels are compiled for such
        addresses, and two numbers can be read as one int64."""
        needed = sum(len(part) + -len(part) % 4 for part in parts)
        if needed > self.capacity:
            self._make_room(needed)
        at, self._next = self._next, (self._next + 1) % len(self._host)
        self._done[at].wait()
        array, places, end = self._arrays[at], [], 0
        for part in parts:
            begin, end = end, end + len(part)
            array[begin:end] = part
            places.append((begin, end))
            end += -end % 4
        self._device_C[:end].copy_(self._host[at][:end], non_blocking=True)
        self._done[at].record()
        return [self._device_C[begin:end] for begin, end in places]


class Downloads:
    """Chosen tokens to the host, at most ``capacity`` a step."""

    def __init__(self, capacity: int, device: torch.device, buffers: int) -> None:
        pinned = device.type == "cuda"
        self._host = [
            torch.empty(capacity, dtype=torch.int64, pin_memory=pinned) for _ in range(buffers)
        ]
        self._done = [_Event(device) for _ in range(buffers)]
        self._next = 0

    def fetch(self, tokens_S: Tensor) -> Download:
        """Begin to copy; the tokens are there when ``Download.tokens`` returns."""
        at, self._next = self._next, (self._next + 1) % len(self._host)
        host_S = self._host[at][: len(tokens_S)]
        self._done[at].wait()
        host_S.copy_(tokens_S, non_blocking=True)
        self._done[at].record()
        return Download(host_S, self._done[at])


class Download:
    """Tokens on their way. They have to be read before the buffer's next turn."""

    def __init__(self, host_S: Tensor, done: _Event) -> None:
        self._host_S, self._done = host_S, done

    def tokens(self) -> list[int]:
        """Wait for the step that chooses them; return them."""
        self._done.wait()
        tokens: list[int] = self._host_S.tolist()
        return tokens


class _Event:
    """Where a stream of the device has come to; on a CPU everything has been done."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
