"""From the tensors of a checkpoint to the parameters of a decoder.

Invariant: every element of every parameter is written exactly once, or loading fails before the
first write. ``placements`` is the whole map; it is made from the configuration alone, compared with
the checkpoint's table of contents, and only then are tensors read::

    checkpoint                                   decoder
    model.layers.0.self_attn.q_proj.weight ──┐   layers.0.attention.qkv.weight
    model.layers.0.self_attn.k_proj.weight ──┼──►  rows 0 …, then k, then v
    model.layers.0.self_attn.v_proj.weight ──┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mie.errors import WeightMismatchError
from mie.model.checkpoint import Checkpoint
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder

SHOWN = 5  # names a message lists before it counts the rest


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor goes: into ``parameter``, from row ``first_row`` on."""

    parameter: str
    shape: tuple[int, ...]
    first_row: int = 0


def placements(config: ModelConfig) -> dict[str, Placement]:
    """For each tensor a checkpoint of this model must hold, by its name there: where it goes."""
    E, V = config.hidden_size, config.vocab_size
    table = {"model.embed_tokens.weight": Placement("embedding.weight", (V, E))}
    for layer in range(config.num_layers):
        table |= _layer(config, f"model.layers.{layer}", f"layers.{layer}")
    table["model.norm.weight"] = Placement("final_norm.weight", (E,))
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = Placement("lm_head.weight", (V, E))
    return table


def _layer(config: ModelConfig, theirs: str, ours: str) -> dict[str, Placement]:
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    family = config.family
    attention, qkv = f"{theirs}.self_attn", f"{ours}.attention.qkv"
    mlp, gate_up = f"{theirs}.mlp", f"{ours}.mlp.gate_up"
    table = {
        f"{theirs}.input_layernorm.weight": Placement(f"{ours}.attention_norm.weight", (E,)),
        **_linear(f"{attention}.q_proj", qkv, (q, E), family.qkv_bias),
        **_linear(f"{attention}.k_proj", qkv, (kv, E), family.qkv_bias, first_row=q),
        **_linear(f"{attention}.v_proj", qkv, (kv, E), family.qkv_bias, first_row=q + kv),
        **_linear(f"{attention}.o_proj", f"{ours}.attention.output", (E, q), family.output_bias),
        f"{theirs}.post_attention_layernorm.weight": Placement(f"{ours}.mlp_norm.weight", (E,)),
        **_linear(f"{mlp}.gate_proj", gate_up, (F, E), family.mlp_bias),
        **_linear(f"{mlp}.up_proj", gate_up, (F, E), family.mlp_bias, first_row=F),
        **_linear(f"{mlp}.down_proj", f"{ours}.mlp.down", (E, F), family.mlp_bias),
    }
    if family.qk_norm:
        for x in "qk":
            norm = Placement(f"{ours}.attention.{x}_norm.weight", (D,))
            table[f"{attention}.{x}_norm.weight"] = norm
    return table


def _linear(
    theirs: str, ours: str, shape: tuple[int, int], bias: bool, first_row: int = 0
) -> dict[str, Placement]:
    found = {f"{theirs}.weight": Placement(f"{ours}.weight", shape, first_row)}
    if bias:
        found[f"{theirs}.bias"] = Placement(f"{ours}.bias", shape[:1], first_row)
    return found


def num_parameters(config: ModelConfig) -> int:
    """How many numbers the model has learned; a tied embedding counts once."""
    return sum(torch.Size(p.shape).numel() for p in placements(config).values())


def load_weights(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Fill ``decoder`` from ``checkpoint``, converting each tensor to the decoder's dtype.

    Raises WeightMismatchError, with nothing written, when a tensor is missing, surplus, of
    another shape, or holds integers where real numbers are wanted.
    """
    table = placements(decoder.config)
    _compare(table, checkpoint)
    parameters = dict(decoder.named_parameters())
    with torch.inference_mode():
        for name, place in table.items():
            rows = slice(place.first_row, place.first_row + place.shape[0])
            parameters[place.parameter][rows].copy_(checkpoint.load(name))


def random_weights(decoder: Decoder, seed: int = 0, std: float = 0.02) -> None:
    """Fill ``decoder`` with seeded noise, norms near one: for tests and timing, not for talking."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        parameter.normal_(mean, std, generator=generator)


def _compare(table: Mapping[str, Placement], checkpoint: Checkpoint) -> None:
    held = checkpoint.tensors
    problems = []
    if missing := [name for name in table if name not in held]:
        problems.append(f"{len(missing)} missing: {_some(missing)}")
    if surplus := [name for name in held if name not in table and not _derived(name, table)]:
        problems.append(f"{len(surplus)} not wanted: {_some(surplus)}")
    shared = [name for name in table if name in held]
    if misshapen := [
        f"{name} is {list(held[name].shape)}, wanted {list(table[name].shape)}"
        for name in shared
        if tuple(held[name].shape) != table[name].shape
    ]:
        problems.append(f"{len(misshapen)} of another shape: {_some(misshapen)}")
    if integers := [f"{name} ({held[name].dtype})" for name in shared if _whole(held[name].dtype)]:
        problems.append(f"{len(integers)} of integers: {_some(integers)}")
    if problems:
        raise WeightMismatchError(f"{checkpoint.path} is not this model's: {'; '.join(problems)}")


def _derived(name: str, table: Mapping[str, Placement]) -> bool:
    """Tensors that some exporters store although they follow from the rest."""
    tied_head = name == "lm_head.weight" and name not in table
    return tied_head or name.endswith(".rotary_emb.inv_freq")


def _whole(dtype: str) -> bool:
    return dtype == "BOOL" or dtype in {
        f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64)
    }


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
