"""The radix tree's own shape: nodes split between blocks, leaves that shrink, roots that go.

What it shares with the hash is in ``test_prefix_cache.py``; both run on the same random traces in
``test_memory_properties.py``.
"""

from __future__ import annotations

import pytest

from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.radix_tree import RadixTree

SIZE = 2


class Memory:
    """Texts are words; a letter stands for the tokens of a block, and a dot ends each text."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.copies = BlockCopies(self.pool)
        self.tree = RadixTree(self.pool)

    def compute(self, word: str, salt: str = "") -> BlockTable:
        tokens = [ord(letter) for letter in word for _ in range(SIZE)] + [0]
        table = BlockTable(self.pool, self.copies, self.tree.match(tokens, salt))
        assert table.append(len(tokens) - table.num_tokens)
        self.tree.insert(table, tokens, len(tokens), salt)
        self.tree.check()
        return table

    def shape(self, salt: str = "") -> dict[str, list[str]]:
        """Each node's letters, with those of its children."""

        def letters(node):
            return "".join(chr(tokens[0]) for tokens in node.tokens)

        return {
            letters(node): sorted(letters(child) for child in node.children.values())
            for node in self.tree.nodes()
            if node.salt == salt
        }


def test_a_text_is_one_node():
    memory = Memory()
    table = memory.compute("ABCD")
    assert memory.shape() == {"ABCD": []}
    (node,) = memory.tree.nodes()
    assert node.blocks == table.blocks[:4]
    assert repr(node) == "Node([1, 2, 3, 4], 0 children)"


def test_a_longer_text_makes_the_leaf_longer():
    memory = Memory()
    memory.compute("AB")
    memory.compute("ABCD")
    assert memory.shape() == {"ABCD": []}


def test_a_text_that_leaves_in_the_middle_splits_the_node():
    memory = Memory()
    memory.compute("ABCD")
    memory.compute("ABX")
    assert memory.shape() == {"AB": ["CD", "X"], "CD": [], "X": []}


def test_a_split_node_keeps_its_children():
    memory = Memory()
    for word in ("ABCD", "ABCX", "AY"):
        memory.compute(word)
    assert memory.shape() == {"A": ["BC", "Y"], "BC": ["D", "X"], "D": [], "X": [], "Y": []}


def test_a_text_that_ends_inside_a_node_splits_nothing():
    memory = Memory()
    memory.compute("ABCD")
    assert memory.compute("ABC").num_registered == 3
    assert memory.shape() == {"ABCD": []}


def test_a_third_way_out_of_a_node_splits_nothing():
    memory = Memory()
    for word in ("AB", "AC", "AD"):
        memory.compute(word)
    assert memory.shape() == {"A": ["B", "C", "D"], "B": [], "C": [], "D": []}


def test_texts_without_a_common_beginning_meet_at_the_root_alone():
    memory = Memory()
    memory.compute("AB")
    memory.compute("BA")
    assert memory.shape() == {"AB": [], "BA": []}


def test_each_salt_has_its_root():
    memory = Memory()
    one, two = memory.compute("AB", "one"), memory.compute("AC", "two")
    assert memory.shape("one") == {"AB": []} and memory.shape("two") == {"AC": []}
    assert set(memory.tree.roots) == {"one", "two"}
    assert not set(one.blocks) & set(two.blocks)


def test_asking_makes_no_root():
    memory = Memory()
    assert memory.tree.match([1] * 5, "never seen") == []
    assert memory.tree.roots == {}


def test_a_table_that_was_registered_before_a_split_goes_on_behind_it():
    memory = Memory()
    table = memory.compute("ABCD")
    memory.compute("ABX")
    tokens = [ord(letter) for letter in "ABCDE" for _ in range(SIZE)]
    table.truncate(4 * SIZE)
    assert table.append(SIZE)
    memory.tree.insert(table, tokens, len(tokens))
    memory.tree.check()
    assert memory.shape() == {"AB": ["CDE", "X"], "CDE": [], "X": []}


def test_eviction_shortens_a_leaf_then_removes_it_then_its_parent_then_the_root():
    memory = Memory(num_blocks=7)
    first = memory.compute("ABC")
    second = memory.compute("ABX")
    first.release()
    second.release()
    shapes = []
    for _ in range(6):
        memory.pool.allocate()
        memory.tree.check()
        shapes.append(memory.shape())
    assert shapes == [
        {"AB": ["C", "X"], "C": [], "X": []},  # two blocks that hold the dots go first
        {"AB": ["C", "X"], "C": [], "X": []},
        {"AB": ["X"], "X": []},
        {"AB": []},
        {"A": []},
        {},
    ]
    assert memory.tree.roots == {} and memory.pool.allocate() == -1


def test_evicting_the_last_text_of_a_salt_leaves_the_others():
    memory = Memory(num_blocks=4)
    memory.compute("A", "one").release()
    kept = memory.compute("B", "two")
    memory.pool.allocate()
    assert set(memory.tree.roots) == {"two"} and kept.num_registered == 1
    memory.tree.check()


def test_finding_the_leaf_takes_no_walk(monkeypatch):
    memory = Memory(num_blocks=40)
    for word in ("ABCD", "ABCX", "AY", "Z"):
        memory.compute(word).release()
    monkeypatch.setattr(RadixTree, "_follow", None)
    monkeypatch.setattr(RadixTree, "nodes", None)
    while memory.pool.allocate() != -1:
        pass
    assert memory.tree.roots == {}


@pytest.mark.parametrize(
    ("words", "block", "shape"),
    [
        (["ABC"], 1, {}),
        (["ABC"], 2, {"A": []}),
        (["ABC", "ABX"], 2, {"A": []}),
        (["ABC", "ABX"], 1, {}),
        (["ABC", "AX", "D"], 1, {"D": []}),
    ],
)
def test_evicting_a_middle_takes_along_what_is_behind_it(words, block, shape):
    memory = Memory()
    for word in words:
        memory.compute(word)
    memory.tree._forget(block)
    memory.pool.unmark_cached(block)
    memory.tree.check()
    assert memory.shape() == shape


def lost_place(tree):
    del tree._places[2]


def wrong_place(tree):
    tree._places[1] = tree._places[2]


def wrong_tokens(tree):
    next(tree.nodes()).tokens.pop()


def wrong_key(tree):
    children = tree.roots[""].children
    children[(9, 9)] = children.pop((65, 65))


def wrong_salt(tree):
    next(tree.nodes()).salt = "other"


def empty_root(tree):
    tree.roots["empty"] = type(tree.roots[""])("empty", None)


def unreachable(tree):
    tree.roots.clear()


@pytest.mark.parametrize(
    "damage",
    [lost_place, wrong_place, wrong_tokens, wrong_key, wrong_salt, empty_root, unreachable],
)
def test_check_finds(damage):
    memory = Memory()
    memory.compute("AB")
    damage(memory.tree)
    with pytest.raises((AssertionError, KeyError)):
        memory.tree.check()
