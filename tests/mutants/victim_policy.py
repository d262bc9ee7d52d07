"""Policies that choose otherwise, good ones and bad ones, and the ways to get one wrong."""

from copy import copy
from itertools import count
from random import choice

from mie.scheduling.policy import fewest_computed, last_admitted


def first_admitted(candidates):
    """The one with the most to lose: a bad policy, and a legal one."""
    return candidates[0]


def most_blocks(candidates):
    return max(candidates, key=lambda each: (len(each.table.blocks), each.sequence_id))


def shortest_answer(candidates):
    return min(candidates, key=lambda each: (each.num_output_tokens, -each.arrival, each.index))


# -- one call --


def the_place(candidates):
    """Where the victim stands, not who it is."""
    return len(candidates) - 1


def a_copy(candidates):
    return copy(candidates[-1])


def the_name(candidates):
    return candidates[-1].name


def all_that_are_old(candidates):
    """Several are better than one."""
    return [each for each in candidates if each.num_output_tokens] or candidates[:1]


def never_the_oldest(candidates):
    """Leaves out the first in line, which the scheduler has done already."""
    return min(candidates[1:], key=lambda each: each.num_computed)


def the_last_but_one(candidates):
    return candidates[-2]


def no_ties(candidates):
    """Compares the sequences where the numbers are the same."""
    return min((each.num_computed, each) for each in candidates)[1]


def the_only_fewest(candidates):
    """Nobody, where two have the same."""
    fewest = min(each.num_computed for each in candidates)
    [victim] = [each for each in candidates if each.num_computed == fewest]
    return victim


def most_per_token(candidates):
    return max(candidates, key=lambda each: len(each.table.blocks) / each.num_output_tokens)


def begun_only(candidates):
    """Whoever has computed something; if nobody has, nobody."""
    return next((each for each in candidates if each.num_computed), None)


def takes_it_out(candidates):
    return candidates.pop()


def sorts_them(candidates):
    candidates.sort(key=lambda each: each.num_computed)
    return candidates[0]


def gives_its_blocks_back(candidates):
    """Does the scheduler's work as well."""
    candidates[-1].table.release()
    return candidates[-1]


def counts_for_itself(candidates):
    candidates[-1].num_preemptions += 1
    return candidates[-1]


def any_of_them(candidates):
    return choice(candidates)


TURNS, CHOSEN = count(), []


def next_in_turn(candidates):
    """Another one each time it is asked."""
    return candidates[next(TURNS) % len(candidates)]


def not_twice(candidates):
    """Nobody twice in a row."""
    fresh = [each for each in candidates if each.sequence_id not in CHOSEN[-1:]]
    victim = (fresh or candidates)[-1]
    CHOSEN.append(victim.sequence_id)
    return victim


# -- an engine that runs on it --


def cuts_long_answers(candidates):
    """The last token has no K and V yet, so it goes as well."""
    victim = candidates[-1]
    if victim.num_output_tokens > 4:
        victim.token_ids.pop()
    return victim


def twins_agree(candidates):
    """Answers to one request go on from the same token."""
    victim = candidates[-1]
    for twin in candidates[:-1]:
        if twin.request is victim.request and victim.num_output_tokens > 3:
            victim.token_ids[-1] = twin.token_ids[-1]
    return victim


def the_patient_only(candidates):
    """Whoever has no priority; everybody has one where the urgent are alone."""
    return next(each for each in candidates if each.priority > 0)


ALTERNATIVES = [
    last_admitted,
    fewest_computed,
    first_admitted,
    most_blocks,
    shortest_answer,
]
KILLED_BY = {
    the_place: "one_of_them",
    a_copy: "one_of_them",
    the_name: "one_of_them",
    all_that_are_old: "one_of_them",
    never_the_oldest: "the_only_one",
    the_last_but_one: "the_only_one",
    no_ties: "equals",
    the_only_fewest: "equals",
    most_per_token: "any_state",
    begun_only: "any_state",
    gives_its_blocks_back: "changes_nothing",
    counts_for_itself: "changes_nothing",
    takes_it_out: "changes_nothing",
    sorts_them: "changes_nothing",
    any_of_them: "same_choice_again",
    next_in_turn: "same_choice_again",
    not_twice: "same_choice_again",
    cuts_long_answers: "under_pressure",
    twins_agree: "with_all_there_is",
    the_patient_only: "with_all_there_is",
}
