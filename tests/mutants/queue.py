"""Queues in other orders, and the ways to get one wrong.

The mutants are the sorted list below, with one piece exchanged.
"""

from random import Random

from mie.scheduling.queue import RankedQueue, StrictPriority


class SortedList:
    """Sorts again for each question. In the order of arrival."""

    def __init__(self):
        self.waiting = []

    def rank(self, sequence):
        return sequence.arrival, sequence.index

    def urgency(self, sequence):
        return 0

    def add(self, sequence):
        self.waiting.append(sequence)

    def remove(self, sequence):
        self.waiting.remove(sequence)

    def peek(self):
        return min(self.waiting, key=self.rank, default=None)

    def __len__(self):
        return len(self.waiting)

    def __iter__(self):
        return iter(sorted(self.waiting, key=self.rank))


class ShortestPromptFirst(SortedList):
    """Long ones may wait for ever: legal, if that is what is wanted."""

    def rank(self, sequence):
        return sequence.num_prompt_tokens, sequence.arrival, sequence.index


class LastComeFirstServed(RankedQueue):
    def rank(self, sequence):
        return -sequence.sequence_id


class Lottery(SortedList):
    """Each draws a ticket when it is first looked at, and keeps it."""

    def __init__(self):
        super().__init__()
        self.tickets, self.random = {}, Random(1)

    def rank(self, sequence):
        return self.tickets.setdefault(sequence.sequence_id, self.random.random())


class SaltedFirst(SortedList):
    """Two classes of customers, and in each of them the shortest prompt first."""

    def rank(self, sequence):
        length = sequence.num_prompt_tokens
        return self.urgency(sequence), length, sequence.arrival, sequence.index

    def urgency(self, sequence):
        return 0 if sequence.request.salt else 1


# -- the order --


class OneRankForARequest(SortedList):
    def rank(self, sequence):
        return sequence.arrival


class PriorityAlone(SortedList):
    def rank(self, sequence):
        return sequence.priority


class InCircles(SortedList):
    """Arrivals count modulo 16, and whoever is less than half of that ahead comes first."""

    def rank(self, sequence):
        return Circle(sequence.sequence_id)


class Circle:
    def __init__(self, number):
        self.number = number

    def __lt__(self, other):
        ahead = (other.number - self.number) % 151
        return 0 < ahead < 76


class OrderOfAdding(SortedList):
    """First in, first out, also for those who come back."""

    def __init__(self):
        super().__init__()
        self.turns, self.turn = {}, 0

    def add(self, sequence):
        super().add(sequence)
        self.turn += 1
        self.turns[sequence.sequence_id] = self.turn

    def rank(self, sequence):
        return self.turns.get(sequence.sequence_id, 0), sequence.sequence_id


class FewestLeft(SortedList):
    """Whoever has least to compute now."""

    def rank(self, sequence):
        return sequence.num_to_compute, sequence.sequence_id


class PreemptedFirst(SortedList):
    def rank(self, sequence):
        return -sequence.num_preemptions, sequence.arrival, sequence.index


class UrgentWhenPreempted(SortedList):
    def urgency(self, sequence):
        return -1 if sequence.num_preemptions else 0


class PrioritiesOfArrival(SortedList):
    """Some are urgent, and stand where they came."""

    def urgency(self, sequence):
        return sequence.priority


class UrgencyUpsideDown(StrictPriority):
    def urgency(self, sequence):
        return -sequence.priority


class UrgencyInWords(SortedList):
    def urgency(self, sequence):
        return "normal"


# -- who waits --


class NeverEmpty(SortedList):
    """Raises where nobody waits."""

    def peek(self):
        return min(self.waiting, key=self.rank)


class RemembersTheLast(SortedList):
    def peek(self):
        if self.waiting:
            self.last = super().peek()
        return getattr(self, "last", None)


class PeekOfAHeap(SortedList):
    """The first that came, whatever its rank."""

    def rank(self, sequence):
        return sequence.num_prompt_tokens, sequence.arrival, sequence.index

    def peek(self):
        return self.waiting[0] if self.waiting else None


class ListsAsTheyCame(SortedList):
    def __iter__(self):
        return iter(self.waiting)


class Pops(SortedList):
    def peek(self):
        sequence = super().peek()
        if sequence:
            self.waiting.remove(sequence)
        return sequence


class OneLook(SortedList):
    """An iterator that takes out what it shows."""

    def __iter__(self):
        self.waiting, shown = [], sorted(self.waiting, key=self.rank)
        for sequence in shown:
            self.waiting.append(sequence)
            yield sequence


class ForgetsWhatItHad(SortedList):
    """Who waits holds no K and V, so the queue sees to that."""

    def add(self, sequence):
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        super().add(sequence)


class MarksThem(SortedList):
    """A sequence says itself that it has left."""

    def remove(self, sequence):
        super().remove(sequence)
        sequence.waits = False


class LooksAreCounted(SortedList):
    def peek(self):
        sequence = super().peek()
        if sequence:
            sequence.num_looks = getattr(sequence, "num_looks", 0) + 1
        return sequence


class RemovesTheFirst(SortedList):
    def remove(self, sequence):
        self.waiting.remove(self.peek())


class RemovesTheRequest(SortedList):
    """All answers to a request leave together."""

    def remove(self, sequence):
        self.waiting = [each for each in self.waiting if each.request is not sequence.request]


class SwapsWithTheLast(SortedList):
    """Fills the gap with the last one, and never sorts."""

    def add(self, sequence):
        super().add(sequence)
        self.waiting.sort(key=self.rank)

    def remove(self, sequence):
        place = self.waiting.index(sequence)
        self.waiting[place] = self.waiting[-1]
        self.waiting.pop()

    def __iter__(self):
        return iter(self.waiting)

    def peek(self):
        return self.waiting[0] if self.waiting else None


class MarkedForGood(RankedQueue):
    """Who has left once is skipped, also when it waits again."""

    def __init__(self):
        super().__init__()
        self.left = set()

    def rank(self, sequence):
        return sequence.arrival, sequence.index

    def remove(self, sequence):
        super().remove(sequence)
        self.left.add(sequence.sequence_id)

    def peek(self):
        waiting = [each for each in self if each.sequence_id not in self.left]
        return waiting[0] if waiting else None


class OldEntriesCount(SortedList):
    """Removed by a mark that a second add takes away: the old entry counts again."""

    def __init__(self):
        super().__init__()
        self.gone = []

    def add(self, sequence):
        if sequence in self.gone:
            self.gone.remove(sequence)
        self.waiting.append(sequence)

    def remove(self, sequence):
        self.gone.append(sequence)

    def all(self):
        return sorted((s for s in self.waiting if s not in self.gone), key=self.rank)

    def peek(self):
        return next(iter(self.all()), None)

    def __len__(self):
        return len(self.all())

    def __iter__(self):
        return iter(self.all())


EVERYBODY = []


class OneListForAll(SortedList):
    def __init__(self):
        EVERYBODY.clear()
        self.waiting = EVERYBODY


class TwentyAtMost(SortedList):
    """A list that was long enough in every test."""

    def add(self, sequence):
        if len(self.waiting) < 20:
            super().add(sequence)

    def remove(self, sequence):
        if sequence in self.waiting:
            super().remove(sequence)


ALTERNATIVES = [
    SortedList,
    StrictPriority,
    ShortestPromptFirst,
    LastComeFirstServed,
    Lottery,
    SaltedFirst,
]
KILLED_BY = {
    OneRankForARequest: "different_ranks",
    PriorityAlone: "different_ranks",
    InCircles: "one_order",
    OrderOfAdding: "rank_stays",
    FewestLeft: "rank_stays",
    PreemptedFirst: "rank_stays",
    UrgentWhenPreempted: "rank_stays",
    PrioritiesOfArrival: "urgency",
    UrgencyUpsideDown: "urgency",
    UrgencyInWords: "urgency",
    NeverEmpty: "nobody_waits",
    RemembersTheLast: "nobody_waits",
    PeekOfAHeap: "in_the_order_of_rank",
    ListsAsTheyCame: "in_the_order_of_rank",
    Pops: "asking_changes_nothing",
    OneLook: "asking_changes_nothing",
    LooksAreCounted: "asking_changes_nothing",
    ForgetsWhatItHad: "coming_and_going",
    MarksThem: "coming_and_going",
    RemovesTheFirst: "from_the_middle",
    RemovesTheRequest: "from_the_middle",
    SwapsWithTheLast: "from_the_middle",
    MarkedForGood: "comes_back",
    OldEntriesCount: "comes_back",
    OneListForAll: "queues_apart",
    TwentyAtMost: "random_trace",
}
