"""The host pool against lists and a device of dictionaries: what comes back is what went out.

The bytes themselves are at the end, and in ``test_model_runner.py``.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_decoder import tiny_decoder

from mie.errors import ConfigError
from mie.execution.kv_cache import PagedKVCache
from mie.execution.swap_space import SwapSpace
from mie.memory.manager import BlockManager
from mie.memory.swap import HostPool, SwapIn, SwapOut

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["out", "out", "in", "drop", "step"]), st.integers(0, 9)),
    max_size=40,
)


@given(num_blocks=st.integers(0, 8), operations=OPERATIONS)
def test_what_comes_back_is_what_went_out(num_blocks, operations):
    """A host block that leaves in a step is nobody else's in that step: out comes before in."""
    host = HostPool(num_blocks)
    device: dict[int, int] = {}  # what each block holds
    memory: dict[int, int] = {}
    outside: list[tuple[list[int], list[int]]] = []  # host blocks, and what they should hold
    arriving: list[tuple[int, int]] = []
    next_block = 1
    for what, number in operations:
        if what == "out":
            blocks = [*range(next_block, next_block + number % 4)]
            next_block += len(blocks)
            device.update((block, 1_000 + block) for block in blocks)
            free = host.num_free
            taken = host.swap_out(blocks)
            if len(blocks) > free:
                assert taken is None and host.num_free == free
            else:
                assert taken is not None and len(taken) == len(blocks)
                outside.append((taken, [device[block] for block in blocks]))
        elif what == "in" and outside:
            taken, content = outside.pop(number % len(outside))
            blocks = [*range(next_block, next_block + len(taken))]
            next_block += len(blocks)
            host.swap_in(taken, blocks)
            arriving += zip(blocks, content, strict=True)
        elif what == "drop" and outside:
            host.drop(outside.pop(number % len(outside))[0])
        elif what == "step":
            outs, ins = host.take()
            memory.update((move.host, device[move.device]) for move in outs)
            device.update((move.device, memory[move.host]) for move in ins)
            assert [(block, device[block]) for block, _ in arriving] == arriving
            arriving = []
            host.launched()
        host.check([taken for taken, _ in outside])


def test_all_or_nothing():
    host = HostPool(2)
    assert host.swap_out([7, 2, 9]) is None and host.take() == ((), ())
    taken = host.swap_out([7, 2])
    assert taken is not None and host.swap_out([9]) is None and host.swap_out([]) == []
    assert host.take() == (tuple(map(SwapOut, [7, 2], taken)), ())


def test_what_is_on_its_way_may_be_dropped():
    host = HostPool(2)
    taken = host.swap_out([7, 2])
    assert taken is not None
    host.drop(taken)
    assert host.take() == ((), ()) and host.num_free == 2


def test_a_block_that_leaves_is_not_given_away_in_the_same_step():
    host = HostPool(1)
    taken = host.swap_out([7])
    host.take()
    host.launched()
    host.swap_in(taken, [4])
    assert host.swap_out([5]) is None, "the step moves out first: it would overwrite what leaves"
    assert host.take() == ((), (SwapIn(taken[0], 4),))
    host.launched()
    assert host.swap_out([5]) == taken


def test_a_leak_and_a_second_owner_are_found():
    host = HostPool(3)
    taken = host.swap_out([7, 2])
    host.check([taken])
    for owners in ([], [taken, taken], [taken[:1]]):
        with pytest.raises(AssertionError):
            host.check(owners)


def test_less_than_no_room_is_refused():
    with pytest.raises(ConfigError, match="host pool of -1 blocks"):
        HostPool(-1)


def test_a_block_whose_copy_waits_is_read_where_its_content_is():
    """A fork that split its tail and is thrown out in the same step: the new block is empty yet."""
    memory = BlockManager(9, 4, num_host_blocks=4)
    first = memory.empty_table()
    first.append(6)
    twin = first.fork()
    assert twin.append(1)
    split = twin.blocks[-1]
    twin.truncate(6)
    memory.swap_out(twin)
    twin.release()
    outs, _ = memory.host.take()
    assert [move.device for move in outs] == first.blocks and split not in first.blocks
    assert memory.copies.take() == [], "and the copy is not needed any longer"


def test_swap_moves_all_bytes_of_a_block_and_no_others():
    cache = PagedKVCache.for_decoder(tiny_decoder(), num_blocks=6, block_size=3)
    space = SwapSpace(cache, num_blocks=4)
    generator = torch.Generator().manual_seed(1)
    cache.kv_L2NBGD.normal_(generator=generator)
    before = cache.kv_L2NBGD.clone()
    space.kv_L2NBGD.fill_(float("nan"))
    assert space.nbytes == cache.nbytes * 4 // 6

    space.move_out([SwapOut(device=5, host=0), SwapOut(device=2, host=3)])
    assert torch.equal(cache.kv_L2NBGD, before)
    assert torch.equal(space.kv_L2NBGD[:, :, [0, 3]], before[:, :, [5, 2]])
    assert space.kv_L2NBGD[:, :, [1, 2]].isnan().all()

    cache.kv_L2NBGD.fill_(float("nan"))
    space.move_in([SwapIn(host=3, device=1), SwapIn(host=0, device=4)])
    assert torch.equal(cache.kv_L2NBGD[:, :, [1, 4]], before[:, :, [2, 5]])
    assert cache.kv_L2NBGD[:, :, [0, 2, 3, 5]].isnan().all()
    space.move_out([])
    space.move_in([])


def test_what_has_not_come_in_yet_is_still_here():
    """A plan broke off after somebody came in; it is thrown out again before a step moved it."""
    host = HostPool(4)
    blocks = host.swap_out([7, 8])
    host.take()
    host.launched()
    host.swap_in(blocks, [3, 5])
    host.launched()  # of a step that has taken nothing
    assert host.num_free == 2, "nobody may write there before it was read"
    assert host.swap_out([3, 5]) == blocks and host.waiting == ((), ())
    host.check([blocks])


def test_what_nobody_waits_for_does_not_come_in():
    host = HostPool(4)
    host.swap_in(host.swap_out([7, 8]), [3, 5])
    host.cancel([3, 5])
    assert host.waiting[1] == () and host.num_free == 4
