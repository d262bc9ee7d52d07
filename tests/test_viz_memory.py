"""The drawings of the memory chapters: what they say in words, and what they show, is the pool's
own state, for any trace; and a moment once taken stays as it was."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hash_seeds import outputs_of
from hypothesis import given
from hypothesis import strategies as st
from strict_html import Tree

from mie.book.palette import look
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import HashPrefixCache
from mie.memory.radix_tree import RadixTree
from mie.viz import Frame, Stepper, block_map, prefix_tree, snapshot, tree_snapshot
from mie.viz.svg import WIDTH

SVG = "{http://www.w3.org/2000/svg}"
BAND = 18  # the height of a block's patterns
AWKWARD = '"<|im_end|>\n\x00'


class Memory:
    """A pool with its copies and a prefix cache; ``shots`` are the moments taken so far."""

    def __init__(self, num_blocks: int = 12, block_size: int = 4) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.copies = BlockCopies(self.pool)
        self.cache = HashPrefixCache(self.pool)
        self.tables: dict[str, BlockTable] = {}
        self.shots = []

    def table(self, name: str, num_tokens: int = 0, blocks=()) -> BlockTable:
        self.tables[name] = table = BlockTable(self.pool, self.copies, blocks)
        assert table.append(num_tokens)
        return table

    def take(self, note: str = "Something has happened.", tokens=None) -> None:
        self.shots.append(snapshot(self.pool, self.tables, note, self.copies, tokens))


def split() -> Memory:
    """A takes 10 tokens, B forks, B writes: a copy waits, is taken, is made; A ends; C hits."""
    memory = Memory()
    a = memory.table("A", 10)
    memory.cache.insert(a, range(10), 10)
    memory.take("A takes blocks.")
    b = memory.tables["B"] = a.fork()
    memory.take("B is forked.")
    b.append(1)
    memory.take("B writes.")
    memory.copies.take()
    memory.take("A step is planned.")
    memory.copies.launched()
    memory.take("The step is launched.")
    memory.tables.pop("A").release()
    memory.take("A ends.")
    memory.tables.pop("B").release()
    memory.take("B ends.")
    memory.table("C", 3, memory.cache.match([*range(8), 99, 99]))
    memory.take("C finds two blocks.")
    return memory


def split_map() -> Stepper:
    return block_map(split().shots, "A split")


# -- reading a drawing -----------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """ "9, 4, 11 to 15" -> [9, 4, 11, 12, 13, 14, 15]"""
    found = []
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition(" to ")
        found += range(int(first), int(last or first) + 1)
    return found


def read_words(text: str) -> dict:
    """The state that the words of a block map tell."""
    note, *lines = text.split("\n")
    said = {"note": note, "tables": {}, "blocks": {}, "copies": [], "changed": []}
    for line in lines:
        if match := re.fullmatch(r"(\w+): (\d+) tokens?.* in (?:no block|blocks? (.+))\.", line):
            said["tables"][match[1]] = (int(match[2]), numbers(match[3] or ""))
        elif match := re.fullmatch(
            r"Blocks? ([\d, to]+): (.+?)(?:, count (\d+))?(?:, (\d+) of \d+ slots filled)?"
            r"(, cached)?\.",
            line,
        ):
            for block in numbers(match[1]):
                filled = int(match[4]) if match[4] else None
                holders = re.split(", | and ", match[2])
                said["blocks"][block] = (holders, int(match[3] or 1), filled, bool(match[5]))
        elif match := re.fullmatch(
            r"Block 0 is scratch; (\d+) of (\d+) others free(?:, next first: (.+))?\.", line
        ):
            said["free"] = (int(match[1]), int(match[2]))
            said["order"] = numbers((match[3] or "").replace("then ", "").replace("cached ", ""))
            said["cached"] = [
                block
                for part in (match[3] or "").split(", then ")
                if part.startswith("cached ")
                for block in numbers(part.removeprefix("cached "))
            ]
        elif line.startswith("Copies that "):
            said["copies"] += re.findall(r"(\d+) → (\d+)", line)
        elif match := re.fullmatch(r"Changed: blocks? (.+)\.", line):
            said["changed"] = numbers(match[1])
        else:
            raise AssertionError(f"unexpected: {line}")
    return said


def boxes(frame: Frame) -> list[tuple[float, float, float, float, str]]:
    """Every filled box: left, top, width, height, fill."""
    found = []
    for path in ET.fromstring(frame.svg).findall(f"{SVG}path"):
        corners = re.fullmatch(
            r"M([\d.-]+) ([\d.-]+)h([\d.]+)v([\d.]+)h-[\d.]+z", path.get("d", "")
        )
        if corners:
            found.append((*map(float, corners.groups()), path.get("fill", "")))
    return found


def stripes(frame: Frame, index: int) -> list[tuple[float, float, float]]:
    """Left, top and width of the stripes in the pattern of table number ``index``."""
    solid = look(index).pattern == "solid"
    fill = f"var(--mie-{look(index).colour}" if solid else f"-{look(index).pattern}-"
    return [(x, y, w) for x, y, w, h, f in boxes(frame) if h == BAND and fill in f]


def texts(frame: Frame) -> list[ET.Element]:
    return ET.fromstring(frame.svg).findall(f"{SVG}text")


def heavy(frame: Frame) -> list[tuple[float, float]]:
    """The left upper corners of what is outlined as changed, without the legend's sample."""
    found = [
        tuple(map(float, re.findall(r"-?[\d.]+", path.get("d"))[:2]))
        for path in ET.fromstring(frame.svg).findall(f"{SVG}path")
        if path.get("stroke-width") == "2.4"
    ]
    return found[:-1]


def arrows(frame: Frame) -> list[list[tuple[float, float]]]:
    """The lines of copies; their heads are separate shapes."""
    found = []
    for path in ET.fromstring(frame.svg).findall(f"{SVG}path"):
        if path.get("stroke-width") == "1.6":
            points = re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d"))
            found.append([(float(x), float(y)) for x, y in points])
    return found


def places(frame: Frame) -> dict[int, tuple[float, float]]:
    """Where the number of each block of the pool stands; blocks are drawn in order."""
    found: dict[int, tuple[float, float]] = {}
    for text in texts(frame):
        if text.text == str(len(found)) and text.get("text-anchor") is None:
            found[len(found)] = (float(text.get("x")), float(text.get("y")))
    return found


# -- the words -------------------------------------------------------------------------------------


def operations():
    return st.lists(
        st.tuples(
            st.sampled_from(["new", "append", "fork", "launch", "truncate", "release", "insert"]),
            st.integers(0, 5),
            st.integers(1, 9),
        ),
        min_size=1,
        max_size=25,
    )


def play(memory: Memory, trace) -> None:
    """What can be done of ``trace``, with a moment taken after each operation."""
    for kind, which, count in trace:
        name = "ABCDEF"[which]
        table = memory.tables.get(name)
        if kind == "new" and table is None:
            memory.tables[name] = BlockTable(memory.pool, memory.copies)
            memory.tables[name].append(count)
        elif kind == "launch":
            memory.copies.take()
            memory.copies.launched()
        elif table is None:
            continue
        elif kind == "append":
            table.append(count)
        elif kind == "fork":
            memory.copies.take()
            memory.copies.launched()
            twin = next((n for n in "ABCDEF" if n not in memory.tables), None)
            if twin:
                memory.tables[twin] = table.fork()
        elif kind == "truncate":
            table.truncate(min(count, table.num_tokens))
        elif kind == "release":
            memory.tables.pop(name).release()
        elif kind == "insert" and len(memory.copies) == 0 and table.num_registered == 0:
            memory.cache.insert(table, [which] * table.num_tokens, table.num_tokens)
        memory.take()


@given(operations(), st.integers(8, 40), st.sampled_from([2, 3, 4, 16]))
def test_the_words_tell_the_whole_state_whatever_happens(trace, num_blocks, block_size):
    memory = Memory(num_blocks, block_size)
    memory.take("The beginning.")
    states = []

    def oracle():
        pool, copies = memory.pool, memory.copies
        used, free = {}, list(pool.free_blocks())
        for block in range(1, num_blocks):
            holders, fills = [], []
            for name, table in memory.tables.items():
                if block in table.blocks:
                    index = table.blocks.index(block)
                    holders.append(name)
                    fills.append(min(block_size, table.num_tokens - index * block_size))
            if copies.pins(block):
                pins = copies.pins(block)
                holders.append("a copy" if pins == 1 else f"{pins} copies")
            if pool.ref_count(block):
                filled = max(fills, default=None)
                used[block] = (holders, pool.ref_count(block), filled, pool.is_cached(block))
        return {
            "tables": {n: (t.num_tokens, list(t.blocks)) for n, t in memory.tables.items()},
            "blocks": used,
            "free": (pool.num_free, num_blocks - 1),
            "order": free,
            "cached": [block for block in free if pool.is_cached(block)],
        }

    states.append(oracle())
    original = memory.take
    memory.take = lambda: (original(), states.append(oracle()))
    play(memory, trace)
    for frame, state in zip(block_map(memory.shots, "trace").frames, states, strict=True):
        said = read_words(frame.text)
        for key, value in state.items():
            assert said[key] == value


@given(operations())
def test_every_picture_shows_each_owner_of_each_block_in_its_pattern(trace):
    memory = Memory(14, 4)
    play(memory, trace)
    if not memory.shots:
        return
    names = list(dict.fromkeys(t.name for shot in memory.shots for t in shot.tables))
    stepper = block_map(memory.shots, "trace")
    heights = set()
    for shot, frame in zip(memory.shots, stepper.frames, strict=True):
        heights.add(ET.fromstring(frame.svg).get("viewBox"))
        for index, name in enumerate(names):
            listed = [block for block, state in enumerate(shot.blocks) if name in state.owners]
            assert len(stripes(frame, index)) == len(listed)
    assert len(heights) == 1


def test_a_shared_block_shows_both_patterns_and_its_count():
    frame = split_map().frames[1]
    assert "Blocks 1, 2: A and B, count 2, 4 of 4 slots filled, cached." in frame.text
    first, second = stripes(frame, 0), stripes(frame, 1)
    assert len(first) == len(second) == 3
    for (x, y, width), (right, top, _) in zip(first, second, strict=True):
        assert (right, top) == pytest.approx((x + width, y), abs=0.01)
    assert [text.text for text in texts(frame)].count("×2") == 3


def test_the_filled_part_of_a_block_is_to_scale():
    memory = Memory(8, 16)
    memory.table("A", 16 + 4)
    memory.take()
    (_, _, full), (_, _, quarter) = stripes(block_map(memory.shots, "t").frames[0], 0)
    assert quarter == pytest.approx(full / 4, rel=1e-3)


def test_tokens_are_written_into_the_slots_and_whole_in_the_words():
    memory = Memory(8, 4)
    memory.table("A", 5)
    memory.take(tokens={"A": ["The", " cat", " unbelievably", AWKWARD, " on"]})
    frame = block_map(memory.shots, "t").frames[0]
    drawn = [text.text for text in texts(frame)]
    assert {"The", "·cat", "·on"} <= set(drawn)
    assert "·unbelievably" not in drawn
    assert 'A: 5 tokens “The cat unbelievably"<|im_end|>⏎\\x00 on” in blocks 1, 2.' in frame.text
    Tree(Stepper([frame] * 2, "t").html())


@pytest.mark.parametrize("block_size", [4, 16])
def test_small_blocks_leave_the_tokens_to_the_words(block_size):
    memory = Memory(40, block_size)
    memory.table("A", 17)
    memory.take(tokens={"A": [f" w{i}" for i in range(17)]})
    frame = block_map(memory.shots, "t").frames[0]
    assert not any("w1" in text.text for text in texts(frame))
    assert "w16” in blocks 1" in frame.text


def test_a_long_free_list_is_cut_in_the_picture_and_whole_in_the_words():
    memory = Memory(40, 4)
    memory.take()
    frame = block_map(memory.shots, "t").frames[0]
    assert read_words(frame.text)["order"] == list(range(1, 40))
    assert "39 of 39 others free, next first: 1 to 39." in frame.text
    more = [text.text for text in texts(frame) if text.text.startswith("…")]
    shown = sum(height == 19 for *_, height, _ in boxes(frame))
    assert more == [f"… {39 - shown} more"]
    assert 8 <= shown <= 12


def test_cached_blocks_are_marked_and_named_whether_free_or_used():
    used, *_, free, _ = split_map().frames
    assert "then cached 2, 1." in free.text
    assert [text.text for text in texts(free)].count("cached") == 2 + 1  # and the legend

    def bars(frame):  # 4 high, in the grid, the free list and the legend
        paths = [path for path in ET.fromstring(frame.svg).iter() if path.get("opacity") == "0.75"]
        return len(paths)

    assert bars(used) == 2 + 1
    assert bars(free) == 2 + 2 + 1


# -- copies ----------------------------------------------------------------------------------------


def test_a_split_is_seen_block_by_block():
    forked, waits, taken, launched = split_map().frames[1:5]
    for frame in (forked, launched):
        assert arrows(frame) == []
        assert "→" not in frame.text
    for frame, when in ((waits, "wait for a step"), (taken, "belong to the step")):
        assert re.search(rf"Copies that {when}.*: 3 → 4\.", frame.text)
        assert "Block 3: A and a copy, count 2, 2 of 4" in frame.text
        assert "Block 4: B and a copy, count 2, 3 of 4" in frame.text
        assert len([1 for *_, h, fill in boxes(frame) if h == BAND and "-checks-" in fill]) == 2
    assert "B: 11 tokens in blocks 1, 2, 4." in waits.text
    assert "Block 3: A, 2 of 4" in launched.text


@given(st.integers(8, 40), st.data())
def test_arrows_run_from_source_to_target_and_cross_no_block(num_blocks, data):
    drawn = st.permutations(range(1, num_blocks))
    order = data.draw(drawn)
    memory = Memory(num_blocks, 4)
    table = memory.table("A", 4 * (num_blocks - 1))
    pairs = list(zip(order[::2], order[1::2], strict=False))[: data.draw(st.integers(1, 4))]
    for source, target in pairs:
        memory.copies.add(source, target)
    memory.take()
    frame = block_map(memory.shots, "t").frames[0]
    assert read_words(frame.text)["copies"] == [(str(s), str(t)) for s, t in pairs]
    assert len(table.blocks) == num_blocks - 1
    numbers_at = places(frame)
    (x0, _), (x1, _) = numbers_at[0], numbers_at[1]
    width, height = x1 - x0 - 12, 35
    cells = {b: (x - 1, y - 12, x - 1 + width, y - 12 + height) for b, (x, y) in numbers_at.items()}
    lines = arrows(frame)
    for (source, target), (line, head) in zip(
        pairs, zip(lines[::2], lines[1::2], strict=True), strict=True
    ):
        for block, (x, y) in ((source, line[0]), (target, head[-1])):
            left, top, right, bottom = cells[block]
            assert left < x < right
            assert min(abs(y - top), abs(y - bottom)) < 12
        assert all(0 < x < WIDTH for x, _ in line)
        for (xa, ya), (xb, yb) in pairwise(line):
            for left, top, right, bottom in cells.values():
                crosses = min(xa, xb) < right and max(xa, xb) > left
                assert not (crosses and min(ya, yb) < bottom and max(ya, yb) > top)


# -- what has changed ------------------------------------------------------------------------------


def test_what_has_changed_is_outlined_and_named():
    frames = split_map().frames
    assert read_words(frames[0].text)["changed"] == []
    assert heavy(frames[0]) == []
    for frame in frames[1:]:
        changed = read_words(frame.text)["changed"]
        at = places(frame)
        grid = [corner for corner in heavy(frame) if corner[1] <= max(y for _, y in at.values())]
        assert len(grid) == len(changed)
        for block, (x, y) in zip(changed, grid, strict=True):
            assert (x, y) == pytest.approx((at[block][0] - 4, at[block][1] - 14), abs=0.01)
    assert read_words(frames[2].text)["changed"] == [3, 4]
    rows = [y for x, y in heavy(frames[2]) if y > max(y for _, y in places(frames[2]).values())]
    assert len(rows) == 1  # the number that was swapped in B's table


def test_a_token_an_owner_and_the_cache_each_change_a_block():
    memory = Memory()
    table = memory.table("A", 2)
    memory.take()
    table.append(2)
    memory.take()
    memory.pool.incref(1)
    memory.take()
    memory.pool.mark_cached(1)
    memory.take()
    memory.take("Nothing happens.")
    changed = [read_words(frame.text)["changed"] for frame in block_map(memory.shots, "t").frames]
    assert changed == [[], [1], [1], [1], []]


def test_a_moment_stays_as_it_was():
    memory = Memory()
    a = memory.table("A", 6)
    words = ["x"] * 6
    memory.take(tokens={"A": words})
    before = block_map(memory.shots, "t").frames[0]
    words[0] = "y"
    b = a.fork()
    b.append(1)
    a.release()
    memory.copies.take()
    memory.copies.launched()
    memory.pool.mark_cached(b.blocks[0])
    assert block_map(memory.shots, "t").frames[0] == before
    with pytest.raises(AttributeError):
        memory.shots[0].note = "other"


def test_owners_that_are_not_shown_are_said():
    memory = Memory()
    hidden = BlockTable(memory.pool, memory.copies)
    hidden.append(4)
    memory.tables["A"] = hidden.fork()
    hidden.append(3)
    memory.take()
    text = block_map(memory.shots, "t").frames[0].text
    assert "Block 1: A and 1 owner not shown, count 2, 4 of 4 slots filled." in text
    assert "Block 2: 1 owner not shown." in text


def test_a_plain_list_of_blocks_is_a_table_of_full_ones():
    pool = BlockPool(8, 4)
    mine = [pool.allocate(), pool.allocate()]
    frame = block_map([snapshot(pool, {"mine": mine}, "Two blocks.")], "t").frames[0]
    assert read_words(frame.text)["tables"] == {"mine": (8, [1, 2])}
    assert len(stripes(frame, 0)) == 2


# -- form ------------------------------------------------------------------------------------------


def overlaps(frame: Frame) -> list[tuple[str, str]]:
    """Texts that cover one another or leave the picture, by a rough measure of their width."""
    spans = []
    for text in texts(frame):
        words, size = text.text or "", float(text.get("font-size"))
        width = size * len(words) * (0.602 if text.get("class") == "mono" else 0.52)
        shift = {"end": 1, "middle": 0.5}.get(text.get("text-anchor"), 0)
        left = float(text.get("x")) - shift * width
        spans.append((left, left + width, float(text.get("y")), size, words))
    found = [
        (words, "edge") for left, right, _, _, words in spans if left < -1 or right > WIDTH + 6
    ]
    for i, (left, right, y, size, words) in enumerate(spans):
        for other_left, other_right, other_y, other_size, other in spans[i + 1 :]:
            apart = 0.75 * min(size, other_size)
            if left < other_right and other_left < right and abs(y - other_y) < apart:
                found.append((words, other))
    return found


def crowded() -> Stepper:
    memory = Memory(40, 2)
    table = memory.table("a long name", 40)
    for name in "BCDE":
        memory.tables[name] = table.fork()
    memory.tables["F"] = BlockTable(memory.pool, memory.copies)
    memory.take(tokens={"a long name": [" word"] * 40})
    for name in "BCDE":
        memory.tables[name].append(1)
        memory.tables[name].writable(3)
    memory.take()
    return block_map(memory.shots, "Crowded")


def greeting_tree() -> Stepper:
    return prefix_tree(grown_tree()[1], "A tree")


@pytest.mark.parametrize("draw", [split_map, crowded, greeting_tree])
def test_pages_are_well_formed_and_no_text_covers_another(draw):
    stepper = draw()
    Tree(stepper.html())
    sizes = {ET.fromstring(frame.svg).get("viewBox") for frame in stepper.frames}
    assert len(sizes) == 1
    for frame in stepper.frames:
        root = ET.fromstring(frame.svg)
        assert [child.tag for child in root[:2]] == [f"{SVG}title", f"{SVG}desc"]
        assert overlaps(frame) == []


def test_colours_follow_the_page():
    for stepper in (split_map(), crowded(), greeting_tree()):
        for frame in stepper.frames:
            for element in ET.fromstring(frame.svg).iter():
                for channel in ("fill", "stroke"):
                    value = element.get(channel, "none")
                    assert re.fullmatch(
                        r"none|currentColor|url\(#.+\)|var\(--mie-\w+, #\w+\)", value
                    )


def test_the_same_trace_gives_the_same_bytes():
    assert split_map().frames == split_map().frames
    program = (
        "from mie.memory.block_pool import BlockPool; from mie.viz import *\n"
        "p = BlockPool(9, 4); t = {'A': [p.allocate()], 'B': [p.allocate()]}\n"
        "print(block_map([snapshot(p, t, 'Two.')], 'T').html())\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    runs = outputs_of(program)
    assert runs[0] == runs[1]


# -- refusals --------------------------------------------------------------------------------------


def test_a_map_refuses_what_it_cannot_draw():
    def shot(num_blocks, block_size=4, names=()):
        pool = BlockPool(num_blocks, block_size)
        return snapshot(pool, {name: [pool.allocate()] for name in names}, "note")

    with pytest.raises(ValueError, match="'t' needs at least one snapshot"):
        block_map([], "t")
    with pytest.raises(ValueError, match="snapshot 2 shows 9 blocks of 4 slots, the first one 8"):
        block_map([shot(8), shot(9)], "t")
    with pytest.raises(ValueError, match=r"snapshot 2 shows 8 blocks of 2 slots, .* 8 of 4"):
        block_map([shot(8), shot(8, 2)], "t")
    with pytest.raises(ValueError, match="a pool of 81 blocks; a map shows 80"):
        block_map([shot(81)], "t")
    with pytest.raises(ValueError, match="7 tables; a map has patterns for 6"):
        block_map([shot(9, names="ABCD"), shot(9, names="EFG")], "t")


def test_a_snapshot_refuses_what_does_not_agree():
    memory = Memory(8, 4)
    table = memory.table("A", 3)
    with pytest.raises(ValueError, match="table A has 3 tokens, and 2 texts are given"):
        memory.take(tokens={"A": ["x", "y"]})
    with pytest.raises(ValueError, match=r"tokens are given for \['B'\], and the tables are"):
        memory.take(tokens={"B": []})
    memory.tables["B"] = table
    with pytest.raises(ValueError, match="block 1 counts 1 owner, and 2 tables and 0 copies"):
        memory.take()
    with pytest.raises(ValueError, match="table A lists block 8; the pool has blocks 1 to 7"):
        snapshot(memory.pool, {"A": [8]}, "note")
    with pytest.raises(ValueError, match="table A lists block 0"):
        snapshot(memory.pool, {"A": [0]}, "note")


# -- the prefix tree -------------------------------------------------------------------------------


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def grown_tree():
    """A tree of five moments: empty, one text, a split, one given back, an eviction."""
    pool = BlockPool(8, 4)
    copies, tree = BlockCopies(pool), RadixTree(pool)
    shots = [tree_snapshot(tree, decode, "Nothing yet.")]

    def add(text: str, salt: str = "") -> BlockTable:
        ids = [ord(letter) for letter in text]
        table = BlockTable(pool, copies, tree.match(ids, salt))
        assert table.append(len(ids) - table.num_tokens)
        tree.insert(table, ids, len(ids), salt)
        return table

    one = add("You are a dog. ")
    shots.append(tree_snapshot(tree, decode, "One text."))
    two = add("You are no cat. ")
    shots.append(tree_snapshot(tree, decode, "A split."))
    one.release()
    shots.append(tree_snapshot(tree, decode, "One is done."))
    two.release()
    add("You are a" * 2, salt="b")
    shots.append(tree_snapshot(tree, decode, "Another salt needs room."))
    return tree, shots


def read_tree(text: str) -> dict[int, tuple[str, str, int]]:
    """Of each block: the path of its node, its text, its count."""
    found = {}
    for line in text.split("\n"):
        if match := re.fullmatch(r"Node ([\d.]+): (.+)\.", line):
            for block, said, held in re.findall(
                r"block (\d+) “(.*?)”, (evictable|held by \d+)", match[2]
            ):
                count = 0 if held == "evictable" else int(held.removeprefix("held by "))
                found[int(block)] = (match[1], said, count)
    return found


def test_the_words_of_a_tree_tell_its_nodes_texts_and_counts():
    tree, shots = grown_tree()
    empty, one, split_, given_back, salted = prefix_tree(shots, "A tree").frames
    assert "Nothing is cached." in empty.text
    assert read_tree(one.text) == {1: ("1", "You", 1), 2: ("1", "are", 1), 3: ("1", "a do", 1)}
    assert read_tree(split_.text) == {
        1: ("1", "You", 2),
        2: ("1", "are", 2),
        3: ("1.1", "a do", 1),
        5: ("1.2", "no c", 1),
        6: ("1.2", "at.", 1),
    }
    assert "Nothing is evictable." in split_.text
    assert read_tree(given_back.text)[3] == ("1.1", "a do", 0)
    assert "Evictable after 2 free blocks, next first: 3." in given_back.text
    assert "Changed: blocks 1, 2, 3." in given_back.text
    assert "With the salt b:" in salted.text
    last = read_tree(salted.text)
    assert {block: count for block, (_, _, count) in last.items()} == {
        block: tree.pool.ref_count(block) for node in tree.nodes() for block in node.blocks
    }
    assert re.search(r"Evicted: blocks? ", salted.text)


def test_held_and_evictable_blocks_of_a_tree_have_different_patterns():
    _, shots = grown_tree()
    for shot, frame in zip(shots, prefix_tree(shots, "A tree").frames, strict=True):
        counts = [each.count for each in shot.texts.values()]
        held = [fill for *_, h, fill in boxes(frame) if h == 17]
        assert len(held) == sum(count > 0 for count in counts)
        assert all("-diagonal-" in fill for fill in held)
        drawn = [text.text for text in texts(frame)]
        assert all(f"×{count}" in drawn for count in counts if count)
        for number in map(str, (*shot.texts, *shot.evictable)):
            assert number in drawn


def test_what_is_new_in_a_tree_is_outlined():
    _, shots = grown_tree()
    frames = prefix_tree(shots, "A tree").frames
    assert heavy(frames[0]) == []
    assert [len(heavy(frame)) for frame in frames[1:4]] == [3, 4, 3]


def test_a_block_that_changes_its_text_or_tenant_was_evicted():
    pool = BlockPool(2, 4)
    copies, tree = BlockCopies(pool), RadixTree(pool)
    shots = []
    for salt in ("", "b"):
        with BlockTable(pool, copies) as table:
            table.append(4)
            tree.insert(table, [ord(letter) for letter in "same"], 4, salt)
        shots.append(tree_snapshot(tree, decode, "note"))
    text = prefix_tree(shots, "t").frames[1].text
    assert "With the salt b:" in text
    assert "Evicted: block 1." in text
    _, shots = grown_tree()
    assert shots[2].texts[5].before == ("", "You ", "are ")


def test_a_moment_of_a_tree_stays_as_it_was():
    tree, shots = grown_tree()
    before = prefix_tree(shots, "t").frames
    while tree.pool.num_free:
        tree.pool.allocate()
    assert prefix_tree(shots, "t").frames == before


def test_a_tree_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="'t' needs at least one snapshot"):
        prefix_tree([], "t")
    pool = BlockPool(60, 1)
    copies, tree = BlockCopies(pool), RadixTree(pool)
    for first in range(41):
        with BlockTable(pool, copies) as table:
            table.append(1)
            tree.insert(table, [first], 1)
    with pytest.raises(ValueError, match="a tree of 41 nodes; a drawing shows 40"):
        prefix_tree([tree_snapshot(tree, decode, "wide")], "t")
