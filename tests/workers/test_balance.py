import itertools
import random

import pytest

from rlinf.workers.algorithms.balance import pack, partition


def sums(weights, parts):
    return [sum(weights[i] for i in part) for part in parts]


def is_partition(weights, parts):
    return sorted(i for part in parts for i in part) == list(range(len(weights)))


def test_fewer_rows_than_parts_leave_the_last_parts_empty():
    assert partition([5, 5, 5], 4) == [[0], [1], [2], []]
    assert partition([], 3) == [[], [], []]


@pytest.mark.parametrize("weights", [[100, 0, 0], [0, 0, 0], [0, 0, 0, 0, 9], [3, 0, 1, 0, 0, 0]])
def test_rows_of_length_zero_still_fill_every_part(weights):
    parts = partition(weights, 3)
    assert is_partition(weights, parts)
    assert all(parts)


def test_small_cases_are_all_valid():
    for n in range(1, 6):
        for weights in itertools.product((0, 1, 3), repeat=n):
            for k in range(1, 5):
                parts = partition(weights, k)
                assert is_partition(weights, parts)
                assert len(parts) == k
                assert sum(not part for part in parts) == max(0, k - n)


def test_sums_come_close_to_equal():
    rng = random.Random(0)
    for k in (2, 3, 8):
        weights = [rng.randint(1, 4096) for _ in range(128)]
        totals = sums(weights, partition(weights, k))
        assert max(totals) - min(totals) <= 0.01 * max(totals)


def test_the_largest_part_is_near_the_best_there_is():
    """Against brute force; longest-first, which is simpler, has this bound (Graham 1969)."""
    rng = random.Random(2)
    for _ in range(40):
        k, weights = rng.choice([2, 3]), [rng.randint(0, 40) for _ in range(7)]
        best = min(
            max(sums(weights, [[i for i in range(7) if places[i] == part] for part in range(k)]))
            for places in itertools.product(range(k), repeat=7)
        )
        found = max(sums(weights, partition(weights, k)))
        assert best <= found <= (4 / 3 - 1 / (3 * k)) * best + 1e-9


def test_the_result_is_the_same_every_time():
    weights = [7, 7, 3, 3, 5, 5, 1]
    assert partition(weights, 3) == partition(weights, 3) == partition(tuple(weights), 3)


@pytest.mark.parametrize(("weights", "parts"), [([1], 0), ([1, -1], 2)])
def test_nonsense_is_refused(weights, parts):
    with pytest.raises(ValueError, match="at least one part"):
        partition(weights, parts)


def test_packed_parts_fit_when_padded():
    rng = random.Random(1)
    lengths = [rng.randint(1, 90) for _ in range(200)]
    parts = pack(lengths, 256)
    assert is_partition(lengths, parts)
    assert all(max(lengths[i] for i in part) * len(part) <= 256 for part in parts)


def test_a_row_that_is_too_long_gets_a_part_of_its_own():
    assert pack([10, 300, 2], 20) == [[1], [0, 2]]
    assert pack([], 20) == []
