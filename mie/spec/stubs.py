"""Where a reader begins: each part's signature, with nothing behind it.

Invariant: a stub checks as TODO, neither right nor wrong. Copy one into a file or a cell, write it,
and check it there; what it must do is in the spec of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # names of types only, so that a pool's stub doesn't wait for torch
    import torch
    from torch import Tensor

    from mie.memory.block_copies import BlockCopies
    from mie.memory.manager import BlockManager
    from mie.memory.prefix_cache import HitCounter
    from mie.model.checkpoint import TensorInfo
    from mie.request import Request
    from mie.request import Sequence as Running
    from mie.scheduling.limits import Limits
    from mie.scheduling.plan import SequenceOutput, StepPlan, StepResult


class SafetensorsReader:
    """One ``.safetensors`` file: its table of contents at once, its tensors when asked for."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        """Read the header. Raises ``CheckpointError``, naming the file, unless all is sound."""
        raise NotImplementedError("read the header and fill self.path and self.tensors")

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor ``name`` as stored, or converted to ``dtype``."""
        raise NotImplementedError("cut the tensor's bytes out of the file")


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32, rounded to x's dtype."""
    raise NotImplementedError("normalise each row")


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + R]) by its angle, in float32, rounded to x's dtype."""
    raise NotImplementedError("turn each pair")


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) · up, in float32, rounded to the input's dtype."""
    raise NotImplementedError("let the gate decide")


def attention(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float) -> Tensor:
    """Causal grouped-query attention; the T queries are the last T of the S positions."""
    raise NotImplementedError("weigh the values")


class BlockPool:
    """Who owns which block of K/V memory. Blocks are numbers; block 0 is scratch, nobody's.

    No owner and no mark is taken from or given to a number that is no block: -1, 0, ``num_blocks``.
    """

    num_blocks: int  # with scratch
    block_size: int  # slots of a block
    num_free: int  # blocks that allocate could hand out
    on_evict: Callable[[int], None]  # set by a prefix cache, and may be called without one

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All free. Raises ``ConfigError`` for fewer than 2 blocks or fewer than 1 slot."""
        raise NotImplementedError("put all blocks but block 0 into a free list")

    def allocate(self) -> int:
        """A free block, now with one owner; ``INVALID_BLOCK``, which is -1, if there is none.

        First the blocks that aren't cached, last freed first; then the cached ones, least recently
        freed first. Such a one isn't cached any more, and ``on_evict`` is called with it.
        """
        raise NotImplementedError("hand out the first free block")

    def incref(self, block: int) -> None:
        """One more owner. A free block that is cached is used again; another is refused."""
        raise NotImplementedError("count one owner more")

    def decref(self, block: int) -> None:
        """One owner less; without any, the block is free. Refused if it is so already."""
        raise NotImplementedError("count one owner less")

    def ref_count(self, block: int) -> int:
        """How many owners ``block`` has."""
        raise NotImplementedError("look it up")

    def mark_cached(self, block: int) -> None:
        """A prefix cache knows from now on what is in ``block``. A free one is refused."""
        raise NotImplementedError("remember it")

    def unmark_cached(self, block: int) -> None:
        """No cache knows it any more. If it is free, it is the next to be handed out.

        Refused for a block that isn't cached.
        """
        raise NotImplementedError("forget it")

    def is_cached(self, block: int) -> bool:
        """Whether a prefix cache knows what is in ``block``."""
        raise NotImplementedError("look it up")

    def free_blocks(self) -> Iterator[int]:
        """The free blocks in the order in which ``allocate`` would hand them out, all still free.

        For drawings and checks: it may take a while.
        """
        raise NotImplementedError("go through the free blocks")


class BlockTable:
    """The blocks of one sequence. It owns one reference to each of them."""

    blocks: Sequence[int]  # of tokens 0 … block_size - 1, then of the next, and so on
    num_tokens: int  # how many slots are taken
    num_registered: int  # how many of the first blocks a prefix cache knows

    def __init__(self, pool: Any, copies: BlockCopies, blocks: Iterable[int] = ()) -> None:
        """``blocks`` are full, registered, and referenced for this table already."""
        raise NotImplementedError("begin with these blocks")

    def blocks_to_append(self, num_tokens: int) -> int:
        """How many blocks ``append(num_tokens)`` would take, one for a split among them."""
        raise NotImplementedError("count them")

    def append(self, num_tokens: int) -> bool:
        """Slots for more tokens, none in a shared block. False, and no change, if too few are free.

        A block is shared if another table owns it too, or the pool says that it is cached;
        ``copies.pins(block)`` of its owners don't count. A shared one is split: ``copies.add(old,
        new)``, then ``decref`` of the old one, then the new one takes its place. Less than no
        token is refused.
        """
        raise NotImplementedError("take blocks from the pool")

    def slot(self, position: int) -> int:
        """Where the token at ``position`` lies. A position without a token is refused."""
        raise NotImplementedError("block times block size plus offset")

    def slots(self, begin: int, end: int) -> Sequence[int]:
        """The slots of positions ``begin`` to ``end`` (exclusive)."""
        raise NotImplementedError("the slot of each")

    def fork(self) -> Self:
        """A second table with the same tokens in the same blocks, without a copy.

        They have been written by a step: copies are made before the next step writes.
        """
        raise NotImplementedError("share the blocks")

    def writable(self, position: int) -> bool:
        """Split the block at ``position`` if it is shared. False, and no change, if none is free.

        The block is not registered after a split. Refused where a registered block stands behind
        that of ``position``.
        """
        raise NotImplementedError("split what is shared")

    def register(self, block: int) -> None:
        """The next block that isn't registered is so now. If its name is another than ``block``,
        that one has the same tokens: own it, list it, give the old one back.

        Refused if the next block isn't full, or still waits for its copy: ``copies.fills(block)``.
        """
        raise NotImplementedError("count it, or take the other")

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens. Blocks behind them go back, last one first. To keep more than
        there are, or less than none, is refused.

        The copy for a block that nobody else reads is called off: ``copies.cancel(block)``.
        """
        raise NotImplementedError("give blocks back from the end")

    def release(self) -> None:
        """Keep nothing. A second call has nothing to give back."""
        raise NotImplementedError("give all blocks back")

    def __enter__(self) -> Self:
        raise NotImplementedError("the table itself")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        raise NotImplementedError("release")

    def __copy__(self) -> Self:
        """Refused, as is a deep copy: it would own what the pool never counted."""
        raise NotImplementedError("refuse, with another error than this one")

    def __deepcopy__(self, memo: object) -> Self:
        raise NotImplementedError("refuse, with another error than this one")


class PrefixCache:
    """Which beginnings of texts are in which blocks."""

    hits: HitCounter  # the engine fills it

    def __init__(self, pool: Any) -> None:
        """Knows nothing. Puts a method of its own into ``pool.on_evict``, to forget a block."""
        raise NotImplementedError("begin with nothing, and listen to the pool")

    def match(self, token_ids: Sequence[int], salt: str = "") -> Sequence[int]:
        """The blocks of the longest known beginning, in order, each ``incref``-ed for the caller.

        Full blocks only, and never all of the tokens. Texts with different salts share nothing.
        """
        raise NotImplementedError("follow the text, block by block")

    def insert(
        self, table: Any, token_ids: Sequence[int], num_computed: int, salt: str = ""
    ) -> None:
        """The full blocks of ``table`` among its first ``num_computed`` tokens are known now.

        For each from ``table.num_registered`` on, in order: a beginning that is new goes to
        ``pool.mark_cached``; ``table.register`` is told the block that holds it, new or known.
        """
        raise NotImplementedError("register what isn't known yet")

    def clear(self) -> bool:
        """Forget all, ``unmark_cached`` each block. False, and no change, if one has an owner."""
        raise NotImplementedError("forget everything")


class Scheduler:
    """Which tokens of which sequences run in the next step."""

    limits: Limits
    memory: BlockManager
    running: list[Running]  # those that have a table, in the order of their admission
    waiting: Any  # the queue

    def __init__(
        self, limits: Limits, memory: BlockManager, queue: Any, victim_policy: Any
    ) -> None:
        """Nobody waits and nobody runs."""
        raise NotImplementedError("begin with nobody")

    def add(self, request: Request) -> Running:
        """One more waits. Raises what ``mie.scheduling.limits.max_output`` raises, at once."""
        raise NotImplementedError("make a sequence and put it into the queue")

    def abort(self, request_id: str) -> None:
        """Its answers end, in whatever state. Unknown or ended: nothing happens."""
        raise NotImplementedError("end them; what a step is writing into goes back after it")

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something or has an end to report."""
        raise NotImplementedError("ask all who are here")

    def schedule(self) -> StepPlan:
        """The plan of the next step, with the moves that ``memory.host`` and ``.copies`` take."""
        raise NotImplementedError("give the budget away")

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """The step is done: ``memory.launched()``. A token or an end for each that has one."""
        raise NotImplementedError("count what is computed, append what was chosen")

    def failed(self, plan: StepPlan) -> None:
        """The step broke off: ``memory.launched()``. What it touched is computed again."""
        raise NotImplementedError("send all that it touched back to the queue")


class Queue:
    """Who waits, in an order of the queue's own."""

    def add(self, sequence: Running) -> None:
        """One more waits: a new one, or one that was preempted."""
        raise NotImplementedError("put it at its rank")

    def peek(self) -> Running | None:
        """Who is next, still in the queue; None if nobody waits."""
        raise NotImplementedError("the lowest rank")

    def remove(self, sequence: Running) -> None:
        """It waits no longer, wherever it stood."""
        raise NotImplementedError("take it out")

    def rank(self, sequence: Running) -> Any:
        """Its place in the order, as something that ``<`` compares. It never changes."""
        raise NotImplementedError("what decides, and then what breaks ties")

    def urgency(self, sequence: Running) -> int:
        """The coarse part of its rank: only strictly less may push out what runs."""
        raise NotImplementedError("one number for all, unless some may push")

    def __len__(self) -> int:
        raise NotImplementedError("how many wait")

    def __iter__(self) -> Iterator[Running]:
        raise NotImplementedError("all that wait, from the lowest rank up")


def victim_policy(candidates: Sequence[Running]) -> Running:
    """One of ``candidates``, who run, in the order of admission: it gives all its blocks back."""
    raise NotImplementedError("choose one")


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``(y_TE, sum_TE)``: x + residual, rounded to their dtype, and the RMSNorm of that sum."""
    raise NotImplementedError("add, and norm what was added")


def paged_decode(
    q_XHD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_XM: Tensor,
    lengths_X: Tensor,
    scale: float,
) -> Tensor:
    """``out_XHD``: the attention of one query a sequence over the blocks that its table names."""
    raise NotImplementedError("follow the table")


def paged_prefill(
    q_THD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_SM: Tensor,
    starts_S1: Tensor,
    lengths_S: Tensor,
    scale: float,
) -> Tensor:
    """``out_THD``: causal attention of S sequences' last tokens, which stand in one row."""
    raise NotImplementedError("find whose each query is, and what it sees")


STUBS: dict[str, Any] = {
    "safetensors_reader": SafetensorsReader,
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": swiglu,
    "attention": attention,
    "block_pool": BlockPool,
    "block_table": BlockTable,
    "prefix_cache": PrefixCache,
    "scheduler": Scheduler,
    "queue": Queue,
    "victim_policy": victim_policy,
    "add_rms_norm": add_rms_norm,
    "paged_decode": paged_decode,
    "paged_prefill": paged_prefill,
}
