"""Safetensors files made by hand, byte by byte, so that they can also be wrong.

Invariant: nothing here checks anything: the specs need files that no library would write.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Header = dict[str, Any] | str | bytes


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def float32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@contextmanager
def a_file(header: Header, data: bytes, header_bytes: int | None = None) -> Iterator[Path]:
    """A file of this content, for a while. ``header_bytes`` lies about the length of the header."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    length = struct.pack("<Q", len(raw) if header_bytes is None else header_bytes)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(length + raw + data)
        yield path
