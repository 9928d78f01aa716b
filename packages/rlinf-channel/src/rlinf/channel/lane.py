"""Items waiting in one channel, in order, with an index by key."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from rlinf.channel.messages import Item

TOLERANCE = 1e-9
"""Relative; sums of weights such as ten times 0.1 count as exact."""


class Lane:
    """Items in order of admission; one that comes back takes its old place again.

    An item that is taken from the middle leaves its entry behind until that comes to the front.
    """

    __slots__ = ("_gone", "_items", "weight")

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._gone: set[int] = set()
        """Orders of the entries whose items are not here. Never that of the first."""
        self.weight = 0.0
        """Total weight; 0 exactly when empty."""

    def __len__(self) -> int:
        return len(self._items) - len(self._gone)

    def __iter__(self) -> Iterator[Item]:
        gone = self._gone
        return (i for i in self._items if i.order not in gone) if gone else iter(self._items)

    def head(self) -> Item:
        """The first item; the lane must not be empty."""
        return self._items[0]

    def append(self, item: Item) -> None:
        """Add an item whose order is above every other's."""
        self._items.append(item)
        self.weight += item.weight

    def append_all(self, items: Collection[Item]) -> None:
        """Add items in their order."""
        self._items += items
        self.weight += sum([item.weight for item in items])

    def take_first(self, count: int) -> list[Item]:
        """Take out the first so many items."""
        items = self._items
        if self._gone:
            first: list[Item] = []
            while len(first) < count:
                first.append(items.popleft())
                self._trim()
        elif count == len(items):
            first = list(items)
            items.clear()
        else:
            popleft = items.popleft
            first = [popleft() for _ in range(count)]
        taken = sum([item.weight for item in first])
        self.weight = self.weight - taken if items else 0.0
        return first

    def remove(self, item: Item) -> None:
        """Take an item out, wherever it stands."""
        self._gone.add(item.order)
        self._trim()
        self.weight = self.weight - item.weight if self._items else 0.0

    def restore(self, returned: Sequence[Item]) -> None:
        """Put items back where their order belongs (`returned` ascends)."""
        items, gone = self._items, self._gone
        self.weight += sum([item.weight for item in returned])
        if gone:
            still = gone.intersection([item.order for item in returned])
            gone -= still
            returned = [item for item in returned if item.order not in still]
        if not returned:
            return
        last = returned[-1].order
        before: list[Item] = []
        while items and items[0].order < last:
            before.append(items.popleft())
        merged = sorted([*before, *returned], key=lambda item: item.order, reverse=True)
        items.extendleft(merged)

    def _trim(self) -> None:
        items, gone = self._items, self._gone
        while items and items[0].order in gone:
            gone.remove(items.popleft().order)


class Lanes:
    """Every queued item of a channel: one lane over all, and one for each key in use."""

    __slots__ = ("all", "by_key")

    def __init__(self) -> None:
        self.all = Lane()
        self.by_key: dict[str, Lane] = {}

    def __len__(self) -> int:
        return len(self.all)

    def get(self, key: str | None) -> Lane | None:
        """The lane of a key, or of everything for None; None if no such item is queued."""
        return self.all if key is None else self.by_key.get(key)

    def append(self, item: Item) -> None:
        """Add an item at the end."""
        self.all.append(item)
        if item.key is not None:
            self.by_key.setdefault(item.key, Lane()).append(item)

    def append_all(self, items: Collection[Item]) -> None:
        """Add items at the end."""
        self.all.append_all(items)
        for item in items:
            if item.key is not None:
                self.by_key.setdefault(item.key, Lane()).append(item)

    def take_first(self, count: int, key: str | None) -> list[Item]:
        """Take out the first so many items of a key, or of all."""
        if key is not None:
            items = self.by_key[key].take_first(count)
            for item in items:
                self.all.remove(item)
            if not self.by_key[key]:
                del self.by_key[key]
            return items
        items = self.all.take_first(count)
        if self.by_key:
            for item in items:
                if item.key is not None:
                    self._forget(item, item.key)
        return items

    def _forget(self, item: Item, key: str) -> None:
        lane = self.by_key[key]
        lane.remove(item)
        if not lane:
            del self.by_key[key]

    def restore(self, returned: Sequence[Item]) -> None:
        """Put items back at the front, each where its order belongs."""
        if not returned:
            return
        ordered = sorted(returned, key=lambda item: item.order)
        self.all.restore(ordered)
        for key in {item.key for item in ordered if item.key is not None}:
            lane = self.by_key.setdefault(key, Lane())
            lane.restore([item for item in ordered if item.key == key])


def batch(lane: Lane, max_items: int | None, target_weight: float | None) -> tuple[int, bool]:
    """How many items a batch would hold if it were taken now, and whether it is complete.

    Complete: `max_items` are there, or they weigh exactly `target_weight`, or the next one would
    exceed it. An item heavier than the target is a complete batch alone.
    """
    if target_weight is None:
        complete = max_items is not None and len(lane) >= max_items
        return (max_items or 0) if complete else len(lane), complete
    count = 0
    weight = 0.0
    for item in lane:
        if count and weight + item.weight > target_weight * (1 + TOLERANCE):
            return count, True
        count += 1
        weight += item.weight
        if count == max_items or weight >= target_weight * (1 - TOLERANCE):
            return count, True
    return count, False
