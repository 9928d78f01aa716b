"""Tags on the wire: runs of consecutive numbers as first, last, first, last, ..."""

from collections.abc import Iterable, Sequence

Ranges = tuple[int, ...]


def ranges(tags: Iterable[int]) -> Ranges:
    """The runs in which tags follow each other; the order given is kept."""
    runs: list[int] = []
    for tag in tags:
        if runs and tag == runs[-1] + 1:
            runs[-1] = tag
        else:
            runs += (tag, tag)
    return tuple(runs)


def expand(runs: Ranges) -> Sequence[int]:
    """The tags that `ranges` was given."""
    if len(runs) == 2:
        return range(runs[0], runs[1] + 1)
    tags: list[int] = []
    for first, last in zip(runs[::2], runs[1::2], strict=True):
        tags.extend(range(first, last + 1))
    return tags
