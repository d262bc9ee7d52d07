"""The tests of the tests: each spec accepts what is right and each of its rules refuses something.

``tests/mutants/<part>.py`` holds what they are tried on: other implementations that are right, and
mutants, each with the case that must kill it.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from mie import parts, spec
from mie.memory.block_copies import BlockCopies
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import HashPrefixCache
from mie.memory.radix_tree import RadixTree
from mie.spec import State, check
from mie.spec.case import cases_in
from mie.spec.location import PROJECT
from mie.spec.scheduler_traces import trace_of_scheduler
from mie.spec.stubs import STUBS
from mie.viz import block_map, snapshot

MUTANTS = Path(__file__).parent / "mutants"
NAMES = spec.names()


@cache
def tried_on(name: str) -> ModuleType:
    found = spec_from_file_location(f"mutants_of_{name}", MUTANTS / f"{name}.py")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def broken(name: str, implementation) -> list[str]:
    return [outcome.case.name for outcome in check(name, implementation).having(State.FAIL)]


ALL_CASES = [pytest.param(n, case, id=f"{n}-{case.name}") for n in NAMES for case in spec.cases(n)]
ALTERNATIVES = [
    pytest.param(n, right, id=f"{n}-{right.__name__}")
    for n in NAMES
    for right in tried_on(n).ALTERNATIVES
]
ALL_MUTANTS = [
    pytest.param(n, mutant, killer, id=f"{n}-{mutant.__name__}")
    for n in NAMES
    for mutant, killer in tried_on(n).KILLED_BY.items()
]

# -- what the specs accept and refuse -----------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_the_engines_own_keeps_the_rule(name, case):
    case(parts.default(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_engines_own_passes(name):
    report = check(name, parts.default(name)).require()
    assert report.passed and len(report.outcomes) == len(spec.cases(name))


@pytest.mark.parametrize(("name", "implementation"), ALTERNATIVES)
def test_what_is_right_but_built_differently_passes(name, implementation):
    check(name, implementation).require()


@pytest.mark.parametrize("name", ["block_table", "prefix_cache"])
def test_a_pool_that_was_built_differently_serves_the_engine(name, monkeypatch):
    [heap_pool] = tried_on("block_pool").ALTERNATIVES
    monkeypatch.setattr("mie.spec.device.BlockPool", heap_pool)
    for implementation in (parts.default(name), *tried_on(name).ALTERNATIVES):
        check(name, implementation).require()


@pytest.mark.parametrize("queue", tried_on("queue").ALTERNATIVES)
def test_queues_and_schedulers_that_were_built_differently_go_together(queue, monkeypatch):
    monkeypatch.setattr("mie.spec.scheduler_traces.FirstComeFirstServed", queue)
    for scheduler in (parts.default("scheduler"), *tried_on("scheduler").ALTERNATIVES):
        trace_of_scheduler(scheduler)


@pytest.mark.parametrize("policy", tried_on("victim_policy").ALTERNATIVES)
def test_policies_and_schedulers_that_were_built_differently_go_together(policy, monkeypatch):
    monkeypatch.setattr("mie.spec.scheduler_traces.last_admitted", policy)
    for scheduler in (parts.default("scheduler"), *tried_on("scheduler").ALTERNATIVES):
        trace_of_scheduler(scheduler)


@pytest.mark.parametrize("cache_class", [HashPrefixCache, RadixTree])
def test_a_pool_that_was_built_differently_is_drawn_and_checked(cache_class):
    [heap_pool] = tried_on("block_pool").ALTERNATIVES
    pool, text = heap_pool(9, 4), list(range(10))
    copies, cache = BlockCopies(pool), cache_class(pool)
    with BlockTable(pool, copies, cache.match(text)) as table:
        assert table.append(10)
        cache.insert(table, text, 10)
        cache.check()
        with table.fork() as twin:
            assert twin.writable(9)
            split = snapshot(pool, {"one": table, "other": twin}, "A split.", copies)
            assert split.waiting == ((table.blocks[2], twin.blocks[2]),)
    cache.check()
    released = snapshot(pool, {}, "Both are gone.", copies)
    frames = block_map([split, released], "A heap").frames
    assert "8 of 8 others free, next first: 6, 5, 4, 3, 2, 1, then cached 7, 8." in frames[1].text
    assert [pool.allocate() for _ in released.free] == list(released.free)
    cache.check()


@pytest.mark.parametrize(("name", "mutant", "killer"), ALL_MUTANTS)
def test_mutant_is_killed_by_its_case(name, mutant, killer):
    assert killer in broken(name, mutant)


@pytest.mark.parametrize("name", NAMES)
def test_every_case_kills_a_mutant(name):
    killers = tried_on(name).KILLED_BY.values()
    assert set(killers) == {case.name for case in spec.cases(name)}
    assert len(killers) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_the_stub_is_todo(name):
    report = check(name, STUBS[name])
    assert report.state is State.TODO
    assert not report.passed and not report.having(State.FAIL)
    assert "mie/spec/stubs.py" in str(report)


def test_every_part_has_a_spec_and_a_stub():
    assert set(parts.DEFAULTS) == set(NAMES) == set(STUBS)


# -- what a spec must be ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_a_case_says_its_rule_in_one_sentence(name, case):
    assert case.rule[0].isupper() or case.rule[0] in "`b"  # `eps` and bfloat16 stay as they are
    assert case.rule.endswith(".") and ". " not in case.rule
    assert case.otherwise.endswith(".") and "Otherwise" not in case.rule + case.otherwise


def module_with(**functions) -> ModuleType:
    module = ModuleType("mie.spec.some_part")
    vars(module).update(functions)
    return module


def test_a_spec_without_cases_is_an_error():
    with pytest.raises(spec.SpecError, match=r"some_part has no case_\* function"):
        cases_in(module_with(helper=lambda part: None))


@pytest.mark.parametrize(
    "docstring",
    [None, "A rule.", "A rule. It breaks.", "A rule. Otherwise:", "Otherwise: it breaks."],
)
def test_a_case_that_does_not_say_its_rule_is_an_error(docstring):
    def case_zero(part):
        pass

    case_zero.__doc__ = docstring
    with pytest.raises(spec.SpecError, match="case_zero"):
        cases_in(module_with(case_zero=case_zero))


@pytest.mark.parametrize("ask", [spec.cases, spec.rules, lambda name: check(name, print)])
def test_an_unknown_spec_names_the_known_ones(ask):
    with pytest.raises(spec.UnknownSpecError) as refused:
        ask("rotary")
    assert "'rotary'" in str(refused.value)
    assert all(name in str(refused.value) for name in NAMES)


def test_the_table_of_rules_is_made_from_the_cases():
    table = spec.rules("rope")
    page = table._repr_html_()
    assert page.startswith('<div class="mie-output mie-rules"><table>') and page.count("<tr>") == 14
    assert '<th scope="col"' in page and "<caption>What any rope must do: 13 rules" in page
    for case in spec.cases("rope"):
        assert case.name in page and case.name in str(table)
        assert case.rule in " ".join(str(table).split())
    assert "<code>x</code> may be a slice" in page


def test_nothing_in_the_engine_looks_at_the_specs():
    lookers = ("book", "cli.py", "spec")
    for file in (PROJECT / "mie").rglob("*.py"):
        if file.relative_to(PROJECT / "mie").parts[0] not in lookers:
            assert "mie.spec" not in re.sub(r'""".*?"""', "", file.read_text(), flags=re.S), file
