"""Numbers in runs, against sets."""

from hypothesis import given
from hypothesis import strategies as st

from rlinf.channel.run import Run
from rlinf.channel.spans import RunMap, Spans, expand, length, pairs, ranges

NUMBERS = st.sets(st.integers(0, 40))


def as_ranges(numbers: set[int]) -> tuple[int, ...]:
    return ranges(sorted(numbers))


@given(NUMBERS)
def test_ranges_are_the_same_numbers(numbers: set[int]) -> None:
    assert expand(as_ranges(numbers)) == sorted(numbers)
    assert length(as_ranges(numbers)) == len(numbers)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_spans_are_a_set(one: set[int], two: set[int], less: set[int], asked: set[int]) -> None:
    spans = Spans(as_ranges(one))
    spans.update(as_ranges(two))
    spans.difference_update(as_ranges(less))
    wanted = (one | two) - less
    assert expand(spans.ranges()) == sorted(wanted)
    assert spans.ranges() == as_ranges(wanted), "neighbours are one run"
    assert len(spans) == len(wanted) and bool(spans) == bool(wanted)
    assert spans.common(as_ranges(asked)) == len(wanted & asked)


@given(NUMBERS, st.lists(NUMBERS, max_size=4), NUMBERS)
def test_runs_are_cut_at_any_number(held: set[int], cuts: list[set[int]], asked: set[int]) -> None:
    runs = RunMap()
    for first, last in pairs(as_ranges(held)):
        names = range(first, last + 1)
        runs.add(first, Run(names, list(map(float, names)), 1, None, len(names)))
    for cut in cuts:
        assert runs.missing(as_ranges(cut)) == len(cut - held)
        taken, found = runs.cut(as_ranges(cut))
        assert expand(found) == sorted(cut & held)
        assert [n for run in taken for n in run.payload[run.first : run.end]] == expand(found)
        assert sum(run.weight for run in taken) == sum(expand(found))
        held = held - cut
    assert runs.count == len(held) and expand(runs.ranges()) == sorted(held)
    for number, run in runs:
        assert list(run.payload[run.first : run.end]) == list(range(number, number + run.count))
