"""What any block table must do.

    table = Table(pool, copies, blocks)     blocks: full ones, already referenced for this table
    table.blocks, table.num_tokens          what it owns, and how many slots of it are taken
    table.num_registered                    how many of its first blocks the prefix cache knows
    table.blocks_to_append(n)               how many free blocks append(n) would take
    table.append(n)                         slots for n more tokens; False, and nothing, if too few
    table.slot(p), slots(begin, end)        where the tokens at these positions lie
    table.fork()                            a second table of the same blocks
    table.writable(p)                       the block of p is its own now; False if none was free
    table.register(block)                   its next block is known, under this name
    table.truncate(n)                       keep the first n tokens
    table.release(), with table:            keep none

``pool`` is a block pool, ``copies`` the ``BlockCopies`` of all its tables. Here both are the
engine's. ``Device`` stands for the memory: it makes the copies of a step, then writes its tokens.
A call that must be refused may raise anything.
"""

from __future__ import annotations

import copy

from mie.memory.block_pool import blocks_needed
from mie.spec.device import SIZE, Device, TableClass, forked, recorded, register_full
from mie.spec.expect import CounterExample, equal, refuses
from mie.spec.traces import trace_of_tables

# -- where a token lies -------------------------------------------------------------------------


def case_slot(Table: TableClass) -> None:
    """Position p lies in slot `blocks[p // size] * size + p % size`. Otherwise: K and V are written
    to one place and read from another."""
    device = Device(Table, 8)
    other = device.table()
    other.append(3 * SIZE)  # so that the next table's blocks are not their own indices,
    table = device.holding("abcdef")
    other.append(1)  # and not neighbours
    device.append(table, "ghij")
    blocks = list(table.blocks)
    expected = [blocks[p // SIZE] * SIZE + p % SIZE for p in range(10)]
    equal([table.slot(p) for p in range(10)], expected, f"slots of positions 0 … 9 in {blocks}")
    equal(list(table.slots(3, 9)), expected[3:9], f"slots(3, 9) in {blocks}")
    equal(list(table.slots(4, 4)), [], "slots(4, 4)")


def case_slot_of_a_token(Table: TableClass) -> None:
    """A position without a token has no slot. Otherwise: position -1, counted from the end as
    Python does, is read as if it were the last."""
    table = Device(Table, 8).holding("abcde")
    for position in (-1, 5, 8):
        refuses(f"slot({position}) of 5 tokens", table.slot, position)
    for ends in ((-1, 3), (2, 6)):
        refuses(f"slots{ends} of 5 tokens", table.slots, *ends)


# -- growing ------------------------------------------------------------------------------------


def case_whole_blocks(Table: TableClass) -> None:
    """Tokens fill whole blocks, `n / size` rounded up, whether they come at once or one by one.
    Otherwise: behind a block that is just full, a token is written into somebody else's."""
    for count in (1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1):
        needed = blocks_needed(count, SIZE)
        for steps in ([count], [1] * count, [SIZE - 1, count - SIZE + 1]):
            if min(steps) < 1:
                continue
            device = Device(Table, 8)
            table = device.table()
            for step in steps:
                table.append(step)
            got = (table.num_tokens, len(table.blocks), 7 - device.pool.num_free)
            what = f"(num_tokens, len(blocks), blocks taken) after appending {steps}"
            equal(got, (count, needed, needed), what)


def case_append_nothing(Table: TableClass) -> None:
    """`append(0)` takes nothing, even where the last block is shared, and `append(-1)` is refused.
    Otherwise: a step that gives a sequence no token costs it a block and a copy, or one that counts
    wrong drops a token and keeps the block."""
    device, table, twin = forked(Table, "abcde", 4)
    before = device.state(table, twin)
    equal(table.append(0), True, "append(0)")
    equal(device.state(table, twin), before, "the tables after append(0)")
    for held in (table, device.table()):
        device.refuses(
            f"append(-1) to {held.num_tokens} tokens", held.append, -1, table, twin, held
        )


def case_blocks_to_append(Table: TableClass) -> None:
    """`blocks_to_append(n)` is what `append(n)` then takes, with the block for a split. Otherwise:
    the scheduler admits what doesn't fit, or turns away what does."""
    for held in range(2 * SIZE + 1):
        for shared in (False, True):
            for count in range(2 * SIZE + 1):
                device = Device(Table, 12)
                table = device.holding("x" * held)
                twin = table.fork() if shared else None
                before, said = device.pool.num_free, table.blocks_to_append(count)
                table.append(count)
                what = f"blocks for {count} tokens after {held}, {'with' if twin else 'without'}"
                equal(said, before - device.pool.num_free, f"{what} a fork")


def case_all_or_nothing(Table: TableClass) -> None:
    """`append` takes all the blocks it needs, the pool's last one too, or none and says False.
    Otherwise: a sequence that has to wait keeps blocks that would let another one end."""
    device, table, twin = forked(Table, "abc", 6)
    before = device.state(table, twin)
    for count in (4 * SIZE, 4 * SIZE + 1):  # with the split, one block too many and two
        equal(table.append(count), False, f"append({count}) after 3 shared tokens, 4 blocks free")
        equal(device.state(table, twin), before, f"the tables after append({count}) failed")
    equal(table.append(3 * SIZE + 1), True, "append(13) after 3 shared tokens, 4 blocks free")
    equal((table.num_tokens, device.pool.num_free), (16, 0), "(num_tokens, num_free) after it")
    device.owned_by(table, twin, what="after it")
    device = Device(Table, 4)
    table, known = device.holding("abcd"), device.pool.allocate()
    device.pool.mark_cached(known)
    device.pool.decref(known)
    before = device.state(table)
    equal(table.append(3 * SIZE), False, "append(12), one block free and one more that is cached")
    equal(device.state(table), before, "the table and the pool after append(12) failed")


def case_starts_with_hits(Table: TableClass) -> None:
    """The blocks that a table begins with are full, registered and owned already. Otherwise: each
    prefix hit adds an owner that nobody takes away, and the pool runs dry."""
    device = Device(Table, 4)
    found = [device.pool.allocate(), device.pool.allocate()]
    table = device.table(found)
    got = (list(table.blocks), table.num_tokens, table.num_registered)
    equal(got, (found, 2 * SIZE, 2), f"(blocks, num_tokens, num_registered) of Table({found})")
    device.owned_by(table, what="after it")
    device.append(table, "a")
    equal(found, list(table.blocks)[:2], "the list that was handed in, after an append")
    table.release()
    equal(device.pool.num_free, 3, "free blocks of 3 after its release")


# -- sharing and splitting ----------------------------------------------------------------------


def case_fork_shares(Table: TableClass) -> None:
    """A fork lists the same blocks, each with one more owner, and takes none. Otherwise: four
    answers to one long prompt cost four prompts."""
    device = Device(Table, 4)
    table = device.holding("abcdef")
    register_full(table)
    twin = table.fork()
    equal(device.state(twin), device.state(table), "the fork of a table, (blocks, tokens, known)")
    device.owned_by(table, twin, what="after fork()")
    device.owned_by(table, twin, table.fork(), what="after a second one")


def case_forks_apart(Table: TableClass) -> None:
    """What becomes of a fork changes nothing in the table it came from. Otherwise: two answers
    append to one list of blocks, and the shorter one gives back the longer one's."""
    device, table, twin = forked(Table, "abcd")
    before = device.state(table)["tables"]
    for what, change in (
        ("appended to", lambda: device.append(twin, "efghi")),
        ("truncated", lambda: twin.truncate(2)),
        ("released", twin.release),
    ):
        change()
        equal(device.state(table)["tables"], before, f"a table after its fork was {what}")
    device.owned_by(table, what="after its fork was released")


def case_write_splits(Table: TableClass) -> None:
    """A write into a shared block goes to a copy: the writer sees its token, all others what was
    there. Otherwise: two answers to one prompt write into each other."""
    device, table, twin = forked(Table, "abcdefgh")
    third = table.fork()
    device.write(twin, 5, "X")
    equal(device.read(twin), list("abcdeXgh"), "tokens of a fork that wrote X at 5")
    for name, other in (("the first table", table), ("another fork", third)):
        equal(device.read(other), list("abcdefgh"), f"tokens of {name} after a fork wrote X at 5")
    equal(twin.blocks[0], table.blocks[0], "the block that nobody wrote into")
    device.owned_by(table, twin, third, what="after the split")


def case_append_splits(Table: TableClass) -> None:
    """An append into a shared last block goes to a copy, and one into a new block copies nothing.
    Otherwise: the first tokens of two answers lie in one slot."""
    for prompt, copies in (("abcdef", 1), ("abcdefgh", 0)):
        device, table, twin = forked(Table, prompt)
        twin.append(1)
        equal(len(device.copies), copies, f"copies for a token behind {len(prompt)} shared ones")
        device.step([(twin, len(prompt), "X")])
        device.append(table, "YZ")
        equal(device.read(twin), [*prompt, "X"], "tokens of the fork")
        equal(device.read(table), [*prompt, "Y", "Z"], "tokens of the first table")
        device.owned_by(table, twin, what="after both")


def case_copy_then_decref_then_swap(Table: TableClass) -> None:
    """A split writes down the copy, and then gives up the block, the old one and not the new.
    Otherwise: it is somebody else's before it is copied, or the table lists what it doesn't own."""
    table, calls = recorded(Table, 2)
    twin = table.fork()
    [shared] = table.blocks
    calls.clear()
    twin.writable(1)
    equal(calls, [("copy", shared), ("decref", shared)], f"calls that split block {shared}")
    [own] = twin.blocks
    if own == shared:
        raise CounterExample(f"the fork's block after the split: expected a new one, got {own}")


def case_copied_once(Table: TableClass) -> None:
    """Each split asks for one copy, once, and a second write for none. Otherwise: the copy is made
    again in a later step, over the tokens written since."""
    device, table, twin = forked(Table, "abcd")
    twin.writable(1)
    twin.writable(1)
    twin.writable(2)
    expected = [(table.blocks[0], twin.blocks[0])]
    equal([tuple(c) for c in device.copies.take()], expected, "(source, target) of one split")
    device.copies.launched()
    twin.writable(3)
    equal(device.copies.take(), [], "copies of the step after")


def case_last_owner_in_place(Table: TableClass) -> None:
    """Who is alone with a block writes into it, without a copy. Otherwise: every token of every
    sequence that once was forked copies a block."""
    device, table, twin = forked(Table, "abcdef")
    before = list(table.blocks)
    twin.release()
    device.append(table, "g")
    table.writable(0)
    got = (list(table.blocks), len(device.copies))
    equal(got, (before, 0), "(blocks, copies) after the writes")


def case_copies_are_no_readers(Table: TableClass) -> None:
    """A copy that waits doesn't count as a reader of its source, which it reads before anybody
    writes. Otherwise: two forks make two copies where one is enough."""
    device, table, twin = forked(Table, "abcd")
    twin.writable(0)
    table.writable(0)
    equal(len(device.copies), 1, "copies after both of two forks write into their one block")
    device.step([(twin, 0, "X"), (table, 0, "Y")])
    equal(device.read(twin), list("Xbcd"), "tokens of the first to write")
    equal(device.read(table), list("Ybcd"), "tokens of the second")
    device.owned_by(table, twin, what="after the step")


def case_known_content_splits(Table: TableClass) -> None:
    """A write into a block that the prefix cache knows goes to a copy, though nobody else owns it;
    the copy isn't registered. Otherwise: later requests find a text and read another."""
    for write in ("append", "writable"):
        device = Device(Table, 8)
        table = device.holding("abcdefgh")
        first, second = register_full(table)
        for block in (first, second):
            device.pool.mark_cached(block)
        table.truncate(6)
        if write == "append":
            table.append(1)
        else:
            table.writable(5)
        what = f"{write} in block {second}, which is known"
        equal(table.blocks[0], first, f"the block before, after {what}")
        if table.blocks[1] == second:
            raise CounterExample(f"{what}: expected a copy, and it was written into")
        equal(table.num_registered, 1, f"num_registered after {what}")
        equal(device.pool.ref_count(second), 1, "owners of it: the copy that waits")


def case_failed_split(Table: TableClass) -> None:
    """`writable` without a free block says False and changes nothing. Otherwise: the sequence that
    is preempted for it has lost a block already, or lists one that isn't there."""
    device, table, twin = forked(Table, "abcdefgh", 3)
    before = device.state(table, twin)
    equal(twin.writable(6), False, "writable(6) of a shared block, no block free")
    equal(device.state(table, twin), before, "the tables after it")
    device.owned_by(table, twin, what="after it")
    table.release()
    equal(twin.writable(6), True, "writable(6) once the other table is released")


def case_registered_behind(Table: TableClass) -> None:
    """`writable` of a position that registered blocks stand behind is refused and changes nothing.
    Otherwise: K and V that were computed after the old token are registered after the new one."""
    for share in (False, True):
        device = Device(Table, 8)
        table = device.holding("abcdefghij")
        register_full(table)
        tables = [table, table.fork()] if share else [table]
        for position in (0, 3):
            what = f"writable({position}) with 8 of 10 tokens in registered blocks"
            device.refuses(what, table.writable, position, *tables)
        equal(table.writable(4), True, "writable(4), in the last registered block")
        device.owned_by(*tables, what="after it")


def case_register_adopts(Table: TableClass) -> None:
    """`register` of another block with the same tokens takes that one and gives the own one back.
    Otherwise: the same text stands in memory as often as it was computed at the same time."""
    device = Device(Table, 8)
    table, later = device.holding("abcdefgh"), device.holding("abcdefgh")
    register_full(table)
    equal((table.num_registered, device.pool.num_free), (2, 3), "(num_registered, num_free)")
    later.register(table.blocks[0])
    got = (later.blocks[0], later.num_registered, device.pool.num_free)
    equal(got, (table.blocks[0], 1, 4), "(first block, num_registered, num_free) after adopting")
    later.register(table.blocks[1])
    equal(list(later.blocks), list(table.blocks), "blocks after adopting both")
    device.owned_by(table, later, what="after adopting both")


def case_register_what_is_written(Table: TableClass) -> None:
    """`register` of a block that isn't full, or that waits for its copy, is refused and changes
    nothing. Otherwise: later requests find a text in slots that nobody has written."""
    device, table, twin = forked(Table, "abcdef")
    register_full(table)
    block = table.blocks[1]
    device.refuses("register of a block with 2 of 4 tokens", table.register, block, table, twin)
    twin.writable(0)
    what = "register of a block that waits for its copy"
    device.refuses(what, twin.register, twin.blocks[0], table, twin)
    device.step([])
    register_full(twin)
    equal(twin.num_registered, 1, "num_registered once the copy is made")


# -- giving back --------------------------------------------------------------------------------


def case_truncate(Table: TableClass) -> None:
    """`truncate(n)` gives back the blocks behind the first n tokens and only these; n is one of
    0 … `num_tokens`, or it is refused. Otherwise: the rejected tokens of a draft keep blocks, or an
    accepted one loses its own."""
    for held in (2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1):
        for kept in range(held + 1):
            device = Device(Table, 8)
            table = device.holding(range(held))
            register_full(table)
            before, needed = list(table.blocks), blocks_needed(kept, SIZE)
            table.truncate(kept)
            got = (list(table.blocks), table.num_tokens, 7 - device.pool.num_free)
            what = f"truncate({kept}) of {held} tokens"
            equal(got, (before[:needed], kept, needed), f"(blocks, tokens, blocks used) of {what}")
            equal(table.num_registered, min(held // SIZE, needed), f"num_registered of {what}")
            equal(device.read(table), list(range(kept)), f"tokens of {what}")
            for wrong in (-1, kept + 1):
                device.refuses(f"truncate({wrong}) of {kept}", table.truncate, wrong, table)


def case_last_block_first(Table: TableClass) -> None:
    """Blocks go back last one first. Otherwise: the beginning of a text, which the most requests
    have in common, is evicted before its end."""
    for give_back in ("truncate", "release", "with"):
        table, calls = recorded(Table, 4 * SIZE)
        blocks = list(table.blocks)
        if give_back == "truncate":
            table.truncate(1)
        elif give_back == "release":
            table.release()
        else:
            with table:
                pass
        kept = 1 if give_back == "truncate" else 0
        expected = [("decref", block) for block in blocks[kept:][::-1]]
        equal(calls, expected, f"calls of {give_back}, for the blocks {blocks}")


def case_copy_called_off(Table: TableClass) -> None:
    """The copy for a block that its last reader gives back is called off, and no other. Otherwise:
    the memory of a preempted sequence isn't free when the step that needed it is planned."""
    device, table, twin = forked(Table, "abcd", 4)
    twin.writable(0)
    twin.release()
    equal((len(device.copies), device.pool.num_free), (0, 2), "(copies, free blocks of 3)")
    twin = table.fork()
    twin.writable(0)
    reader = twin.fork()
    twin.release()
    device.step([])
    equal(device.read(reader), list("abcd"), "tokens of the fork of a fork that was released")
    reader.release()
    device.owned_by(table, what="after the fork was released")


def case_release_again(Table: TableClass) -> None:
    """A second `release` gives nothing back, and a released table can be used again. Otherwise: a
    request that is aborted as it ends gives its blocks back twice."""
    device = Device(Table, 4)
    table, other = device.holding("abcde"), device.holding("x")
    table.release()
    equal((list(table.blocks), table.num_tokens), ([], 0), "(blocks, num_tokens) when released")
    equal((table.num_registered, device.pool.num_free), (0, 2), "(num_registered, num_free)")
    device.append(other, "yzuvw")
    table.release()
    equal(device.read(other), list("xyzuvw"), "another table after a second release")
    device.owned_by(other, what="after a second release")
    device.append(table, "fg")
    equal(device.read(table), ["f", "g"], "tokens of a table that was used again")


def case_with(Table: TableClass) -> None:
    """`with table` is the table itself, released at the end, after an error too, which goes on.
    Otherwise: every request that fails keeps its memory."""
    device = Device(Table, 4)
    table = device.holding("abcde")

    def request() -> None:
        with table as same:
            equal(same is table, True, "with table as same: same is table")
            raise TimeoutError

    refuses("an error inside of `with table`", request, error=TimeoutError)
    equal(device.pool.num_free, 3, "free blocks of 3 after it")


def case_not_copied(Table: TableClass) -> None:
    """`copy.copy` and `copy.deepcopy` of a table are refused. Otherwise: a sampler that copies its
    request makes a second owner that the pool never counted."""
    device = Device(Table, 4)
    table = device.holding("abcde")
    refuses("copy.copy(table)", copy.copy, table)
    refuses("copy.deepcopy(table)", copy.deepcopy, table)
    device.owned_by(table, what="after it")


# -- all of it ----------------------------------------------------------------------------------


def case_random_trace(Table: TableClass) -> None:
    """Over 600 random steps every table reads what it would if it shared nothing, and nothing is
    left at the end. Otherwise: some order of forks and writes that no rule thought of mixes two
    texts."""
    trace_of_tables(Table)
