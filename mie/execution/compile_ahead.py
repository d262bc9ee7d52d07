"""All kernels of an engine compiled side by side, before the first of them is needed.

Invariant: on a runner that has not run, what is called here changes nothing: rows are padding,
slots negative, contexts empty. And it is called with the shapes and dtypes of real steps, since
that is what a kernel is compiled for.

A kernel is compiled when it is first called, a second or half of one each; one after another that
is most of an engine's start. The compiler is not Python, so threads compile at the same time.
Whatever is missed here is compiled when it is met.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mie.execution.device_state import PADDING, TOKEN
from mie.execution.skinny_forward import FEW, MOST_ROWS

if TYPE_CHECKING:
    from mie.execution.device_runner import DeviceRunner

MANY = 64  # tokens: a step that is no decode of a few


def compile_ahead(runner: DeviceRunner) -> None:
    """Call each kernel of ``runner`` once, in threads. On a CPU there is nothing to compile."""
    if runner.decoder.device.type != "cuda":
        return

    def call(kernel: Callable[[], object]) -> None:
        with torch.inference_mode(), torch.cuda.device(runner.decoder.device):
            kernel()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        for done in [threads.submit(call, kernel) for kernel in every_kernel(runner)]:
            done.result()
    torch.cuda.synchronize(runner.decoder.device)


def every_kernel(runner: DeviceRunner) -> Iterator[Callable[[], object]]:
    """A call of each; the longest to compile come first."""
    yield from _attention(runner)
    yield from _products(runner)
    yield from _rest(runner)


def _attention(runner: DeviceRunner) -> Iterator[Callable[[], object]]:
    most = runner.limits.max_num_seqs
    config = runner.decoder.config
    a_tile = max(2, 64 * config.num_kv_heads // config.num_heads)  # of 64 rows
    for max_new in (runner.limits.token_budget, 1, a_tile):
        yield partial(_prefill, runner, max_new)
    yield partial(_decode, runner, runner.plan_of_few, min(FEW, most))
    yield partial(_decode, runner, runner.plan, most)


def _prefill(runner: DeviceRunner, max_new: int) -> None:
    """Two sequences without a query."""
    starts_S1 = torch.zeros(3, dtype=torch.int32, device=runner.decoder.device)
    rows_S, lengths_S = torch.zeros_like(starts_S1[:2]), torch.zeros_like(starts_S1[:2])
    runner.ops.paged_prefill(
        _heads(runner, MANY),
        *runner.cache.layers[0],
        runner.tables_RM,
        rows_S,
        starts_S1,
        lengths_S,
        runner.scale,
        max_new,
    )


def _decode(runner: DeviceRunner, plan: Any, size: int) -> None:
    """Empty contexts."""
    lengths_X = torch.zeros_like(runner.lengths_X[:size])
    plan.update(lengths_X)
    runner.ops.paged_decode(
        _heads(runner, size),
        *runner.cache.layers[0],
        runner.tables_RM,
        runner.rows_X[:size],
        lengths_X,
        runner.scale,
        plan,
    )


def _products(runner: DeviceRunner) -> Iterator[Callable[[], object]]:
    """Those of a few tokens, and the choice of a token."""
    ops, decoder = runner.ops, runner.decoder
    layer, eps = runner.forward.layers[0], decoder.config.rms_norm_eps
    qkv, output, mlp = layer.attention.qkv, layer.attention.output, layer.mlp
    x_TE = _zeros(runner, MOST_ROWS, decoder.config.hidden_size)
    if runner.skinny is not runner.forward and ops.norm_linear is not None:
        norm = layer.attention_norm.weight
        yield partial(ops.norm_linear, x_TE, norm, eps, qkv.weight, qkv.bias)
        yield partial(ops.norm_linear_swiglu, x_TE, norm, eps, mlp.gate_up.weight)
        for weight in (output.weight, mlp.down.weight):
            wide = _zeros(runner, MOST_ROWS, weight.shape[1])
            yield partial(ops.linear_residual, wide, weight, x_TE)
    yield partial(_sample, runner, 1)


def _sample(runner: DeviceRunner, size: int) -> None:
    vocabulary, device = runner.decoder.config.vocab_size, runner.decoder.device
    runner.ops.sample(
        torch.zeros(size, vocabulary, device=device),
        runner.temperatures_X[:size],
        runner.keys_X[:size],
        runner.draw_positions_X[:size],
        runner.tokens_X[:size],
        last_token_R=runner.state_RC[:, TOKEN],
        rows_S=torch.full_like(runner.rows_X[:size], PADDING),
    )


def _rest(runner: DeviceRunner) -> Iterator[Callable[[], object]]:
    ops, config = runner.ops, runner.decoder.config
    norm, eps = runner.decoder.final_norm.weight, config.rms_norm_eps
    x_TE = _zeros(runner, MANY, config.hidden_size)
    yield partial(ops.rms_norm, x_TE, norm, eps)
    yield partial(ops.add_rms_norm, x_TE, x_TE, norm, eps)
    yield partial(ops.swiglu, _zeros(runner, MANY, 2 * config.intermediate_size))
    for count in (1, MANY):
        heads = config.num_heads + 2 * config.num_kv_heads
        qkv_TX = _zeros(runner, count, heads * config.head_dim)
        at_T = torch.zeros(count, dtype=torch.int64, device=qkv_TX.device)
        yield partial(runner.forward.write, 0, qkv_TX, at_T, at_T + PADDING)
    for max_new in (1, runner.limits.token_budget):
        yield partial(_step_inputs, runner, max_new)
    writes_3U = torch.zeros(3, 1, dtype=torch.int32, device=x_TE.device)  # what stands there
    yield partial(ops.write_state, runner.state_RC, writes_3U)
    scratch = torch.zeros(4, dtype=torch.int32, device=x_TE.device)
    yield partial(ops.copy_blocks, runner.cache.kv_L2NBGD, scratch, scratch)


def _step_inputs(runner: DeviceRunner, max_new: int) -> None:
    """A sequence without a token; its row keeps the length 0."""
    zeros_2 = torch.zeros(2, dtype=torch.int32, device=runner.decoder.device)
    row, none = zeros_2[:1], zeros_2[:0]
    tokens = torch.zeros(3, 0, dtype=torch.int64, device=runner.decoder.device)
    size = runner.cache.block_size
    lengths = torch.empty_like(row)
    runner.ops.step_inputs(
        runner.state_RC, row, zeros_2, row, none, *tokens, lengths, size, max_new
    )


def _heads(runner: DeviceRunner, count: int) -> Tensor:
    config = runner.decoder.config
    return _zeros(runner, count, config.num_heads, config.head_dim)


def _zeros(runner: DeviceRunner, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=runner.decoder.dtype, device=runner.decoder.device)
