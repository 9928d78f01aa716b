"""The producers' side of the queue: numbering, duplicates, bounds and the line of those waiting."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from rlinf.channel.config import ChannelConfig
from rlinf.channel.lane import Lanes
from rlinf.channel.messages import (
    Accepted,
    ClientId,
    Command,
    Item,
    Put,
    Refusal,
    Refused,
)


class _Producer:
    """What is known of one producer: the next number, what came too early, what was refused."""

    __slots__ = ("early", "next", "refused")

    def __init__(self) -> None:
        self.next = 0
        self.early: dict[int, list[Put]] = {}
        self.refused: dict[int, Refusal] = {}


class _Offer:
    """A put which has arrived and waits for room, or the part of it which still does."""

    __slots__ = ("items", "last", "nbytes", "put", "requests", "taken")

    def __init__(self, put: Put, items: Sequence[Item], last: int) -> None:
        self.put = put
        self.items = deque(items)
        self.requests = [put.request]
        self.nbytes = sum([item.nbytes for item in items])
        """Of the items that are still waiting when it arrives."""
        self.taken = len(put.items) - len(items)
        self.last = last
        """The number of the last item."""


class Intake:
    """Takes puts in, in each producer's own order, within the bounds.

    Producers wait in one line, first come first served, so a small item never overtakes a large
    one for ever. A number is used up when its put arrives, whatever becomes of it: a repeated
    message finds its first answer again.
    """

    def __init__(self, config: ChannelConfig) -> None:
        self._max_items = config.max_items
        self._max_bytes = config.buffer_bytes
        self._producers: dict[ClientId, _Producer] = {}
        self._lost: deque[ClientId] = deque()
        self._orders = 0
        self.line: deque[_Offer] = deque()
        self.held_bytes = 0
        """Queued and leased; the queue takes an item's bytes off when it is settled."""
        self.admitted_bytes = 0
        self.closed = False
        self.duplicates = 0

    @property
    def admitted(self) -> int:
        """Items taken in so far."""
        return self._orders

    def seen(self, producer: ClientId, number: int) -> bool:
        """Whether this number has arrived before."""
        known = self._producers.get(producer)
        return known is not None and number < known.next

    def receive(self, put: Put) -> list[Command]:
        """Line a put up behind the others, in its producer's order; answers repeats at once."""
        producer = self._producers.setdefault(put.producer, _Producer())
        if put.first > producer.next and not self.closed:
            producer.early.setdefault(put.first, []).append(put)
            return []
        commands = self._line_up(producer, put)
        while producer.early and (first := min(producer.early)) <= producer.next:
            for early in producer.early.pop(first):
                commands += self._line_up(producer, early)
        return commands

    def admit(self, lanes: Lanes) -> list[Command]:
        """Move what fits from the head of the line into the queue."""
        commands: list[Command] = []
        line = self.line
        while line:
            offer = line[0]
            self._admit_one(offer, lanes)
            if offer.items:
                break
            line.popleft()
            room = None if self._max_items is None else max(self._max_items - len(lanes), 0)
            left = max(self._max_bytes - self.held_bytes, 0)
            commands += [Accepted(request, room, left) for request in offer.requests]
        return commands

    def close(self) -> list[Command]:
        """Refuse what comes from now on, and what came too early; keep what waits in line."""
        self.closed = True
        refused: list[Command] = []
        for producer in self._producers.values():
            for puts in producer.early.values():
                refused += [Refused(put.request, Refusal.CLOSED) for put in puts]
            producer.early.clear()
        return refused

    def expire(self, now: float) -> list[Command]:
        """Refuse offers whose deadline has come."""
        late = [o for o in self.line if o.put.deadline is not None and o.put.deadline <= now]
        return [command for offer in late for command in self._drop(offer, Refusal.FULL)]

    def cancel(self, request: int) -> list[Command]:
        """Take a waiting offer back."""
        found = [offer for offer in self.line if request in offer.requests]
        return [command for offer in found for command in self._drop(offer, Refusal.CANCELLED)]

    def forget(self, worker: str, epoch: int) -> None:
        """A worker's incarnation is lost: what it sent out of order can never be completed.

        What waits in line has arrived and stays. The numbers stay known as well, for the
        latest few thousand producers, in case a message still comes in late.
        """
        for client in [c for c in self._producers if c.worker == worker and c.epoch == epoch]:
            self._producers[client].early.clear()
            self._lost.append(client)
        while len(self._lost) > 4096:
            self._producers.pop(self._lost.popleft(), None)

    def deadline(self) -> float | None:
        """The earliest deadline in the line."""
        times = [o.put.deadline for o in self.line if o.put.deadline is not None]
        return min(times, default=None)

    def _line_up(self, producer: _Producer, put: Put) -> list[Command]:
        skip = producer.next - put.first
        fresh = put.items[skip:] if skip > 0 else put.items
        self.duplicates += min(skip, len(put.items))
        if not fresh:
            return self._repeat(producer, put)
        if self.closed:
            return [Refused(put.request, Refusal.CLOSED, accepted=max(skip, 0))]
        producer.next = put.first + len(put.items)
        if put.void:
            self._refuse(producer, range(put.first, producer.next), Refusal.LEASE_LOST)
            return [Refused(put.request, Refusal.LEASE_LOST, lost=len(fresh))]
        self.line.append(_Offer(put, fresh, producer.next - 1))
        return []

    def _repeat(self, producer: _Producer, put: Put) -> list[Command]:
        last = put.first + len(put.items) - 1
        for offer in self.line:
            if offer.put.producer == put.producer and offer.put.first <= last <= offer.last:
                offer.requests.append(put.request)
                return []
        numbers = range(put.first, last + 1)
        refused = [number for number in numbers if number in producer.refused]
        if refused:
            reason = producer.refused[refused[0]]
            return [Refused(put.request, reason, accepted=len(numbers) - len(refused))]
        return [Accepted(put.request, 0, 0)]

    def _admit_one(self, offer: _Offer, lanes: Lanes) -> None:
        items = offer.items
        held = self.held_bytes + offer.nbytes
        if self._max_items is None and held <= self._max_bytes and not offer.taken:
            self._admit_all(offer, lanes)
            return
        if offer.put.atomic:
            queued = len(lanes) + len(items)
            over = self._max_items is not None and queued > self._max_items
            if (over and len(lanes)) or (held > self._max_bytes and self.held_bytes):
                return
        while items:
            item = items[0]
            if not offer.put.atomic and not self._fits(item, lanes):
                return
            items.popleft()
            item.order = self._orders
            self._orders += 1
            self.held_bytes += item.nbytes
            self.admitted_bytes += item.nbytes
            lanes.append(item)
            offer.taken += 1

    def _admit_all(self, offer: _Offer, lanes: Lanes) -> None:
        """The same for an offer which fits as a whole, which is the usual case."""
        order = self._orders
        for item in offer.items:
            item.order = order
            order += 1
        lanes.append_all(offer.items)
        self._orders = order
        self.held_bytes += offer.nbytes
        self.admitted_bytes += offer.nbytes
        offer.taken += len(offer.items)
        offer.items.clear()

    def _fits(self, item: Item, lanes: Lanes) -> bool:
        if self._max_items is not None and len(lanes) >= self._max_items:
            return False
        return self.held_bytes + item.nbytes <= self._max_bytes or self.held_bytes == 0

    def _drop(self, offer: _Offer, reason: Refusal) -> list[Command]:
        self.line.remove(offer)
        numbers = range(offer.last - len(offer.items) + 1, offer.last + 1)
        self._refuse(self._producers[offer.put.producer], numbers, reason)
        return [Refused(request, reason, accepted=offer.taken) for request in offer.requests]

    @staticmethod
    def _refuse(producer: _Producer, numbers: range, reason: Refusal) -> None:
        producer.refused.update(dict.fromkeys(numbers, reason))
        for old in list(islice(producer.refused, max(len(producer.refused) - 4096, 0))):
            del producer.refused[old]
