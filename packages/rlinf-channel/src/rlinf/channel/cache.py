"""DeviceCache: items that stay on the accelerator of the process which put them.

Their channel carries a claim: who has the item, and under which number. Whoever gets it redeems
the claim, in the same process without a copy, from another through the endpoint. `tiers` decides
what is where; a `Memory` moves it. The server says when an item has left the channel.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rlinf.channel.tiers import Move, Tier, Tiers


class Memory(Protocol):
    """Moves whole items between the tiers. What it returns it is given again for the next move."""

    def device_bytes(self, item: object) -> int:
        """Bytes of the item on a device; 0: it has nothing there."""
        ...

    def free_bytes(self) -> int:
        """Bytes that are free on the device."""
        ...

    def own(self, item: object) -> object:
        """The item in memory of its own, so that the original may be changed."""
        ...

    def to_host(self, item: Any) -> Any:
        """From the device to the host."""
        ...

    def to_device(self, item: Any) -> Any:
        """From the host to the device it was on."""
        ...

    def to_disk(self, item: Any, path: Path) -> Any:
        """From the host to a file."""
        ...

    def from_disk(self, item: Any) -> Any:
        """From its file to the host; the file is removed."""
        ...


class DeviceCache:
    """The items of one producer that are on a device, or were. Thread-safe.

    Args:
        memory: Moves items.
        tiers: Decides.
        folder: Of the disk tier; None: there is none.
        soon: Runs what need not be done at once (fetching ahead) on another thread.
    """

    def __init__(
        self,
        memory: Memory,
        tiers: Tiers,
        folder: Path | None,
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._memory = memory
        self._tiers = tiers
        self._folder = folder
        self._soon = soon
        self._lock = threading.Lock()
        self._items: dict[int, Any] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def hit_rate(self) -> float:
        """The share of items that were on the device when they were needed."""
        with self._lock:
            return self._tiers.hit_rate

    def put(self, item: object, nbytes: int) -> int:
        """Keep an item; its number."""
        own = self._memory.own(item)
        with self._lock:
            number = self._next
            self._next += 1
            self._items[number] = own
            self._carry_out(self._tiers.put(number, nbytes))
        return number

    def take(self, number: int) -> Any:
        """An item, on its device. It stays here until it is done.

        Raises:
            KeyError: It is not here.
        """
        with self._lock:
            self._carry_out(self._tiers.take(number))
            return self._items[number]

    def done(self, numbers: Iterable[int]) -> None:
        """These have left the channel. What is needed next is fetched meanwhile."""
        with self._lock:
            for number in numbers:
                if self._tiers.where(number) is Tier.DISK:
                    self._memory.from_disk(self._items[number])
                self._items.pop(number, None)
                self._tiers.done(number)
        self._soon(self.fetch)

    def fetch(self) -> None:
        """Bring back what is needed next, one item after the other, as far as there is room."""
        moved = True
        while moved:
            with self._lock:
                moves = self._tiers.fetch()
                self._carry_out(moves)
            moved = bool(moves)

    def _carry_out(self, moves: list[Move]) -> None:
        for move in moves:
            item, memory = self._items[move.number], self._memory
            if move.origin is Tier.DEVICE:
                item = memory.to_host(item)
            elif move.origin is Tier.DISK:
                item = memory.from_disk(item)
            if move.target is Tier.DEVICE:
                item = memory.to_device(item)
            elif move.target is Tier.DISK:
                assert self._folder is not None
                item = memory.to_disk(item, self._folder / f"{id(self):x}-{move.number}")
            self._items[move.number] = item


def map_leaves(item: Any, change: Callable[[Any], Any]) -> Any:
    """The item with every leaf of its dicts, lists, tuples and dataclasses changed."""
    if isinstance(item, dict):
        return {key: map_leaves(value, change) for key, value in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(map_leaves(value, change) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(map_leaves(value, change) for value in item)
    if is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in fields(item) if field.init]
        return replace(item, **{n: map_leaves(getattr(item, n), change) for n in names})
    return change(item)
