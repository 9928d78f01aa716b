"""Which items stay on the accelerator: pure decisions about three tiers of memory.

Items are needed in the order of their numbers, first in, first out. So those needed soonest belong
on the device and those needed last furthest from it: what is put while the device is full goes to
the host at once, and whenever room appears the next ones are fetched back before anybody asks.
(Sending the oldest away instead would move each of them twice, just before it is needed.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class Tier(IntEnum):
    """Where an item is; lower is faster."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class Move:
    """Bring an item from one tier to another."""

    number: int
    origin: Tier
    target: Tier


@dataclass(slots=True)
class _Entry:
    nbytes: int
    tier: Tier
    taken: bool = False
    """Somebody works on it: it stays where it is."""


class Tiers:
    """What is where. Every call returns the moves to carry out, in their order.

    Args:
        device_bytes: Room on the device.
        host_bytes: Room on the host; None: no bound.
        disk: Whether there is a third tier. Without it the host takes what has no room elsewhere.

    Attributes:
        hits: Takes which found their item on the device.
        misses: Takes which had to wait for it.
    """

    def __init__(
        self, device_bytes: int, host_bytes: int | None = None, *, disk: bool = False
    ) -> None:
        self._entries: dict[int, _Entry] = {}
        self._room = {Tier.DEVICE: device_bytes, Tier.HOST: host_bytes}
        self._used = dict.fromkeys(Tier, 0)
        self._disk = disk
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def hit_rate(self) -> float:
        """Hits over takes; 1 before the first."""
        takes = self.hits + self.misses
        return self.hits / takes if takes else 1.0

    def where(self, number: int) -> Tier | None:
        """The tier of an item; None: it is not here."""
        entry = self._entries.get(number)
        return None if entry is None else entry.tier

    def used_bytes(self, tier: Tier) -> int:
        """Bytes in a tier."""
        return self._used[tier]

    def put(self, number: int, nbytes: int) -> list[Move]:
        """An item that is on the device now; numbers ascend."""
        waiting = self._used[Tier.HOST] or self._used[Tier.DISK]
        fits = not waiting and self._fits(Tier.DEVICE, nbytes)
        tier = Tier.DEVICE if fits else self._below(nbytes)
        self._entries[number] = _Entry(nbytes, tier)
        self._used[tier] += nbytes
        return [] if tier is Tier.DEVICE else [Move(number, Tier.DEVICE, tier)]

    def take(self, number: int) -> list[Move]:
        """Somebody needs this item, on the device. `KeyError`: it is not here."""
        entry = self._entries[number]
        entry.taken = True
        if entry.tier is Tier.DEVICE:
            self.hits += 1
            return []
        self.misses += 1
        moves: list[Move] = []
        for last in reversed(list(self._movable())):
            if self._fits(Tier.DEVICE, entry.nbytes):
                break
            if last > number:
                moves.append(self._move(last, self._below(self._entries[last].nbytes)))
        moves.append(self._move(number, Tier.DEVICE))  # the device may be too small: it must work
        return moves

    def done(self, number: int) -> None:
        """Nobody needs it any more: there is room for what is needed next, see `fetch`."""
        entry = self._entries.pop(number, None)
        if entry is not None:
            self._used[entry.tier] -= entry.nbytes

    def fetch(self) -> list[Move]:
        """Fetch back the next item that is needed and has room, from the host or the disk."""
        for tier in (Tier.DEVICE, Tier.HOST):
            for number, entry in self._entries.items():
                if entry.tier > tier:
                    if self._fits(tier, entry.nbytes):
                        return [self._move(number, tier)]
                    break
        return []

    def _movable(self) -> Iterator[int]:
        for number, entry in self._entries.items():
            if entry.tier is Tier.DEVICE and not entry.taken:
                yield number

    def _fits(self, tier: Tier, nbytes: int) -> bool:
        room = self._room[tier]
        return room is None or self._used[tier] + nbytes <= room

    def _below(self, nbytes: int) -> Tier:
        return Tier.HOST if self._fits(Tier.HOST, nbytes) or not self._disk else Tier.DISK

    def _move(self, number: int, target: Tier) -> Move:
        entry = self._entries[number]
        move = Move(number, entry.tier, target)
        self._used[entry.tier] -= entry.nbytes
        self._used[target] += entry.nbytes
        entry.tier = target
        return move
