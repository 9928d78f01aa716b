"""Cutting a batch of rows of different lengths into parts of equal work, in plain Python."""

import heapq
from collections.abc import Sequence

__all__ = ["pack", "partition"]

Part = tuple[int, list[int]]
"""Sum of a part's weights, and the indexes in it."""


def partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Cut the indexes of `weights` into `parts` lists with sums as equal as can be had quickly.

    Source: the largest differencing method of Karmarkar and Karp 1982, in its form for any number
    of parts. Indexes ascend within a part. With fewer weights than parts the last parts are empty;
    otherwise none is, whatever the weights (zeros included).

    Raises `ValueError` for `parts` < 1 or a negative weight.
    """
    if parts < 1 or any(weight < 0 for weight in weights):
        raise ValueError(f"need at least one part and no negative weight, got {parts} parts")
    heap = [_entry([(w, [i]), *((0, []) for _ in range(parts - 1))]) for i, w in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        heapq.heappush(heap, _entry(_joined(left, right)))
    best = heap[0][2] if heap else [(0, [])] * parts
    filled = _without_empty([list(indexes) for _, indexes in best], weights)
    return sorted((sorted(part) for part in filled), key=lambda part: (not part, part))


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Cut the indexes of `lengths` into parts that fit `capacity` when padded to their longest row.

    Longest first, so rows of a part are of similar length. A row longer than `capacity` gets a part
    of its own. Every index occurs exactly once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packed: list[list[int]] = []
    for index in order:
        last = packed[-1] if packed else []
        if last and lengths[last[0]] * (len(last) + 1) <= capacity:
            last.append(index)
        else:
            packed.append([index])
    return packed


def _entry(parts: list[Part]) -> tuple[int, int, list[Part]]:
    """A heap entry: the largest difference between parts comes first; ties are broken by index."""
    first = min(indexes[0] for _, indexes in parts if indexes)
    return (parts[-1][0] - parts[0][0], first, parts)


def _joined(left: list[Part], right: list[Part]) -> list[Part]:
    """The largest parts of one with the smallest of the other, sorted largest first."""
    small_first = sorted(right, key=lambda part: (part[0], len(part[1])))
    large_first = sorted(left, key=lambda part: (-part[0], -len(part[1])))
    joined = [(a + c, b + d) for (a, b), (c, d) in zip(large_first, small_first, strict=True)]
    return sorted(joined, key=lambda part: (-part[0], -len(part[1])))


def _without_empty(parts: list[list[int]], weights: Sequence[int]) -> list[list[int]]:
    """Give each empty part the lightest index of the part with the most, where there are enough."""
    for part in parts:
        largest = max(parts, key=len)
        if not part and len(largest) > 1:
            lightest = min(largest, key=lambda i: weights[i])
            largest.remove(lightest)
            part.append(lightest)
    return parts
