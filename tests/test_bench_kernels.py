"""The kernels' benchmark: what it counts, and what it says where there is nothing to measure."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from mie import cli
from mie.bench.kernels import (
    DECODES,
    HEADS,
    PREFILLS,
    KernelTime,
    decode_bytes,
    measure_kernels,
    prefill_flops,
)
from mie.errors import ConfigError
from mie.terminal.bench_kernels import show_kernels


def test_bytes_of_a_decode_are_those_of_every_key_and_value():
    k = torch.empty(128 * 1024, 8, 128, dtype=torch.bfloat16, device="meta")
    assert decode_bytes([1024] * 128, 8) == 2 * k.nbytes


@pytest.mark.parametrize("lengths", [[(5, 5)], [(3, 9), (1, 7)], [(1, 1)]])
def test_operations_of_a_prompt_are_those_of_the_pairs_that_see_each_other(lengths):
    pairs = sum(total - new + t + 1 for new, total in lengths for t in range(new))
    assert prefill_flops(lengths, 28) == pairs * 28 * 128 * 2 * 2


def test_a_table_shows_what_was_measured():
    times = [
        KernelTime("empty", 1.13e-6),
        KernelTime("decode", 131.5e-6, num_bytes=decode_bytes([1024] * 128, 8)),
        KernelTime("prefill", 218e-6, num_flops=prefill_flops([(1024, 1024)] * 16, 16)),
    ]
    with (console := Console(width=80)).capture() as captured:
        show_kernels(times, console)
    shown = captured.get()
    assert all(word in shown for word in ("1.13", "131.50", "4.08", "218.00", "316"))


def test_the_shapes_are_those_of_the_models():
    assert HEADS == {"16-8": (16, 8), "28-4": (28, 4)}
    assert all(heads in HEADS and name.count("/") == 2 for name, (*_, heads, _) in DECODES.items())
    assert all(new <= total for lengths in PREFILLS.values() for new, total in lengths)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be measured")
def test_without_a_gpu_there_is_nothing_to_measure():
    with pytest.raises(ConfigError, match="no CUDA device"):
        measure_kernels()
    result = CliRunner().invoke(cli.app, ["bench", "kernels"])
    assert result.exit_code != 0
