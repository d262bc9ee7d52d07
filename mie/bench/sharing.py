"""One system prompt in front of every request: blocks that need not be there twice.

Invariant: match, append and insert are called as the engine calls them. A request is admitted when
the prompt of the one before it has been written and registered; then all of them answer. They are
counted when all stand in memory at once, and given back after.

    request 0     S S S a a a          S: a block of the system prompt, computed by request 0
    request 1     S S S b b            and only looked up by all the others
    request 2     S S S c c c c
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mie.bench.generous_pool import BLOCK_SIZE, generous_pool, release
from mie.bench.result import Result
from mie.bench.workloads import Request, token_ids
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import HashPrefixCache, NoPrefixCache, PrefixCache
from mie.memory.radix_tree import RadixTree
from mie.memory.usage import memory_usage

SYSTEM_PROMPT_TOKENS = 512
SYSTEM_PROMPT = 0  # the number of its text; request i has text i + 1


@dataclass(frozen=True)
class Sharing(Result):
    """One prefix cache, all requests in memory. ``owners`` are pairs: so many owners, so many of
    the blocks that hold the system prompt."""

    cache: str
    used_blocks: int
    listed_blocks: int  # in all tables together, a shared one once for each
    owners: tuple[tuple[int, int], ...]
    prompt_tokens: int
    found_tokens: int

    @property
    def saved_blocks(self) -> int:
        return self.listed_blocks - self.used_blocks

    @property
    def saved_share(self) -> float:
        return self.saved_blocks / self.listed_blocks

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not found and have to be computed."""
        return self.prompt_tokens - self.found_tokens

    @property
    def hit_rate(self) -> float:
        return self.found_tokens / self.prompt_tokens


@dataclass(frozen=True)
class PrefixSharing(Result):
    """All prefix caches on one workload."""

    num_requests: int
    system_prompt_tokens: int
    block_size: int
    caches: tuple[Sharing, ...]


CACHES: dict[str, Callable[[BlockPool], PrefixCache]] = {
    "none": NoPrefixCache,
    "hash": HashPrefixCache,
    "radix tree": RadixTree,
}


def prefix_sharing(
    requests: Sequence[Request],
    seed: int = 0,
    system_prompt_tokens: int = SYSTEM_PROMPT_TOKENS,
) -> PrefixSharing:
    """Put one system prompt in front of ``requests``, which have nothing else in common."""
    system = token_ids(seed, SYSTEM_PROMPT, system_prompt_tokens)
    texts = [
        system + token_ids(seed, index, request.num_tokens)
        for index, request in enumerate(requests, start=1)
    ]
    caches = tuple(_share(name, requests, texts, len(system)) for name in CACHES)
    return PrefixSharing(len(requests), len(system), BLOCK_SIZE, caches)


def _share(
    name: str, requests: Sequence[Request], texts: Sequence[list[int]], num_system: int
) -> Sharing:
    pool = generous_pool(requests, extra=num_system)
    copies = BlockCopies(pool)
    cache = CACHES[name](pool)
    tables = []
    for request, text in zip(requests, texts, strict=True):
        prompt = text[: num_system + request.prompt_tokens]
        table = BlockTable(pool, copies, cache.match(prompt))
        cache.hits.add(len(prompt), table.num_tokens)
        assert table.append(len(prompt) - table.num_tokens)
        cache.insert(table, prompt, len(prompt))  # a step has written the prompt
        tables.append(table)
    for table, request, text in zip(tables, requests, texts, strict=True):
        assert table.append(request.answer_tokens)
        cache.insert(table, text, len(text) - 1)  # nobody computes the last token's K and V
    pool.check([table.blocks for table in tables])
    usage = memory_usage(pool, tables)
    first = {block for table in tables for block in table.blocks[: num_system // BLOCK_SIZE]}
    owners = Counter(pool.ref_count(block) for block in first)
    release(pool, tables)
    assert cache.clear(), "a block of the cache is still in use"
    return Sharing(
        cache=name,
        used_blocks=usage.used_blocks,
        listed_blocks=usage.listed_blocks,
        owners=tuple(sorted(owners.items())),
        prompt_tokens=cache.hits.queried,
        found_tokens=cache.hits.hit,
    )
