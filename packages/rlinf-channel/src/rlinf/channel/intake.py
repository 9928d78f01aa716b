"""The producers' side of the queue: numbering, duplicates, bounds and the line of those waiting."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from rlinf.channel.config import ChannelConfig
from rlinf.channel.journal import Admitted, ChannelState, Closed, ProducerState, Record
from rlinf.channel.lane import Lanes
from rlinf.channel.messages import (
    Accepted,
    ClientId,
    Command,
    Put,
    Refusal,
    Refused,
    Resume,
)
from rlinf.channel.run import Run
from rlinf.channel.spans import pairs, ranges

REMEMBERED = 4096
"""So many refused numbers of a producer, and so many lost producers, are still known."""


class _Producer:
    """What is known of one producer: the next number, what came too early, what was refused."""

    __slots__ = ("early", "holes", "lost", "next", "refused")

    def __init__(self) -> None:
        self.next = 0
        self.lost = False
        self.early: dict[int, list[Put]] = {}
        self.refused: dict[int, Refusal] = {}
        self.holes: deque[tuple[int, int]] = deque()
        """Numbers from `next` on that will not come (first, last)."""

    def jump(self) -> None:
        """Go past what will not come."""
        while self.holes and self.holes[0][0] <= self.next:
            self.next = max(self.next, self.holes.popleft()[1] + 1)


class _Offer:
    """A put which has arrived and waits for room, or the part of it which still does."""

    __slots__ = ("count", "last", "nbytes", "put", "requests", "runs", "taken")

    def __init__(self, put: Put, runs: Sequence[Run], last: int, taken: int) -> None:
        self.put = put
        self.runs = deque(runs)
        self.count = sum([run.count for run in runs])
        """Items that still wait."""
        self.nbytes = sum([run.nbytes for run in runs])
        """Of these."""
        self.requests = [put.request]
        self.taken = taken
        self.last = last
        """The number of the last item."""

    def take(self, count: int) -> Run:
        """The first so many items of the first run."""
        run = self.runs[0]
        part = self.runs.popleft() if run.count == count else run.split(count)
        self.count -= part.count
        self.nbytes -= part.nbytes
        self.taken += part.count
        return part


class Intake:
    """Takes puts in, in each producer's own order, within the bounds.

    Producers wait in one line, first come first served, so a small item never overtakes a large
    one for ever. A number is used up when its put arrives, whatever becomes of it: a repeated
    message finds its first answer again.
    """

    def __init__(
        self, channel: str, config: ChannelConfig, journal: list[Record] | None = None
    ) -> None:
        self._channel = channel
        self._journal = journal
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

    def receive(self, put: Put) -> list[Command]:
        """Line a put up behind the others, in its producer's order; answers repeats at once."""
        producer = self._producers.setdefault(put.producer, _Producer())
        producer.lost = False
        if put.first > producer.next and not self.closed:
            producer.early.setdefault(put.first, []).append(put)
            return []
        return self._line_up(producer, put) + self._catch_up(producer)

    def expects(self, producer: ClientId) -> int:
        """The next number of a producer."""
        known = self._producers.get(producer)
        return known.next if known else 0

    def resume(self, resume: Resume) -> list[Command]:
        """A producer says which of its numbers may still come: do not wait for the others."""
        producer = self._producers.setdefault(resume.producer, _Producer())
        producer.lost = False
        at, holes = producer.next, list(producer.holes)
        for first, last in pairs((*resume.outstanding, resume.next, resume.next)):
            if at < first:
                holes.append((at, first - 1))
            at = max(at, last + 1)
        producer.holes = deque(sorted(holes))
        return self._catch_up(producer)

    def admit(self, lanes: Lanes, leased: int) -> list[Command]:
        """Move what fits from the head of the line into the queue, of which `leased` are out."""
        commands: list[Command] = []
        line = self.line
        while line:
            offer = line[0]
            self._admit_one(offer, lanes)
            if offer.count:
                break
            line.popleft()
            room = None if self._max_items is None else max(self._max_items - len(lanes), 0)
            left = max(self._max_bytes - self.held_bytes, 0)
            held = len(lanes) + leased
            commands += [Accepted(request, room, left, held) for request in offer.requests]
        return commands

    def close(self) -> list[Command]:
        """Refuse what comes from now on, and what came too early; keep what waits in line."""
        if self._journal is not None and not self.closed:
            self._journal.append(Closed(self._channel))
        self.closed = True
        waiting = [put for puts in self._early() for put in puts if put.request]
        for producer in self._producers.values():
            producer.early.clear()
        return [Refused(put.request, Refusal.CLOSED) for put in waiting]

    def expire(self, now: float) -> list[Command]:
        """Refuse offers whose deadline has come."""
        late = [o for o in self.line if o.put.deadline is not None and o.put.deadline <= now]
        refused = [command for offer in late for command in self._drop(offer, Refusal.FULL)]
        for puts in self._early():
            for index, put in enumerate(puts):
                if put.deadline is not None and put.deadline <= now and put.request:
                    refused.append(Refused(put.request, Refusal.FULL))
                    puts[index] = replace(put, request=0, void=Refusal.FULL)
        return refused

    def refuse_first(self) -> list[Command]:
        """Refuse the head of the line, which waits for what will not come."""
        return self._drop(self.line[0], Refusal.STANDSTILL)

    def cancel(self, request: int) -> list[Command]:
        """Take a waiting offer back; one that came too early will be refused when it is due."""
        for puts in self._early():
            for index, put in enumerate(puts):
                if put.request == request:
                    puts[index] = replace(put, void=Refusal.CANCELLED)
        found = [offer for offer in self.line if request in offer.requests]
        return [command for offer in found for command in self._drop(offer, Refusal.CANCELLED)]

    def forget(self, worker: str, epoch: int) -> None:
        """A worker's incarnation is lost: what it sent out of order can never be completed.

        What waits in line has arrived and stays. The numbers stay known as well, for the
        latest few thousand producers, in case a message still comes in late.
        """
        for client in [c for c in self._producers if c.worker == worker and c.epoch == epoch]:
            self._producers[client].early.clear()
            self._lose(client)

    def _lose(self, client: ClientId) -> None:
        self._producers[client].lost = True
        self._lost.append(client)
        while len(self._lost) > REMEMBERED:
            oldest = self._lost.popleft()
            if oldest in self._producers and self._producers[oldest].lost:
                del self._producers[oldest]

    def save(self, state: ChannelState) -> None:
        """Add what a restarted server must know of the producers."""
        for client, producer in self._producers.items():
            waiting = [o.put.first + o.taken for o in self.line if o.put.producer == client]
            refused = ranges(sorted(producer.refused))
            state.producers[client] = ProducerState(min([producer.next, *waiting]), refused)

    def load(self, state: ChannelState) -> None:
        """Go on from what another server knew. Whoever does not come back is forgotten in time."""
        self.closed = state.closed
        self._orders = state.orders
        self.held_bytes = sum(run.nbytes for _, run in state.items)
        for client, known in state.producers.items():
            producer = self._producers[client] = _Producer()
            producer.next = known.next
            for first, last in pairs(known.refused):
                self._refuse(producer, range(first, last + 1), Refusal.FULL)
                if last >= known.next:  # settled although earlier numbers may still come
                    producer.holes.append((first, last))
            self._lose(client)

    def deadline(self) -> float:
        """The earliest deadline in the line."""
        puts = [offer.put for offer in self.line]
        puts += [p for early in self._early() for p in early if p.request]
        return min([p.deadline for p in puts if p.deadline is not None], default=math.inf)

    def _early(self) -> list[list[Put]]:
        """Puts that came before their turn, to be changed in place."""
        return [puts for p in self._producers.values() if p.early for puts in p.early.values()]

    def _line_up(self, producer: _Producer, put: Put) -> list[Command]:
        count = put.count
        known = min(max(producer.next - put.first, 0), count)
        self.duplicates += known
        if known == count:
            return self._repeat(producer, put)
        if self.closed:
            return [Refused(put.request, Refusal.CLOSED, accepted=known)]
        producer.next = put.first + count
        if put.void:
            self._refuse(producer, range(put.first + known, producer.next), put.void)
            return [Refused(put.request, put.void, accepted=known, lost=count - known)]
        runs = _behind(put.runs, known) if known else put.runs
        self.line.append(_Offer(put, runs, producer.next - 1, known))
        return []

    def _catch_up(self, producer: _Producer) -> list[Command]:
        """Line up what came too early and is now due."""
        commands: list[Command] = []
        producer.jump()
        while producer.early and (first := min(producer.early)) <= producer.next:
            for early in producer.early.pop(first):
                answers = self._line_up(producer, early)
                commands += answers if early.request else ()
            producer.jump()
        return commands

    def _repeat(self, producer: _Producer, put: Put) -> list[Command]:
        last = put.first + put.count - 1
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
        if offer.put.atomic and not self._has_room_for_all(offer, lanes):
            return
        order, number = self._orders, offer.put.first + offer.taken
        taken: list[Run] = []
        while offer.count:
            run = offer.runs[0]
            fits = run.count if offer.put.atomic else self._fits(run, lanes)
            if not fits:
                break
            run = self._enter(offer.take(fits), lanes)
            if self._journal is not None:
                taken.append(run.copy())  # it may be given out before the record is written
        self._record(offer.put.producer, number, order, taken)

    def _record(self, producer: ClientId, number: int, order: int, runs: Sequence[Run]) -> None:
        if self._journal is not None and runs:
            self._journal.append(Admitted(self._channel, producer, number, order, runs))

    def _has_room_for_all(self, offer: _Offer, lanes: Lanes) -> bool:
        """Whether a commit may enter; into an empty channel it always may."""
        queued, held = len(lanes), self.held_bytes
        over = self._max_items is not None and queued + offer.count > self._max_items
        return not ((over and queued) or (held + offer.nbytes > self._max_bytes and held))

    def _enter(self, run: Run, lanes: Lanes) -> Run:
        run.order = self._orders
        self._orders += run.count
        self.held_bytes += run.nbytes
        self.admitted_bytes += run.nbytes
        lanes.append(run)
        return run

    def _fits(self, run: Run, lanes: Lanes) -> int:
        """How many of a run there is room for."""
        room = run.within_bytes(self._max_bytes - self.held_bytes)
        if not room and not self.held_bytes:
            room = 1
        return room if self._max_items is None else max(min(room, self._max_items - len(lanes)), 0)

    def _drop(self, offer: _Offer, reason: Refusal) -> list[Command]:
        self.line.remove(offer)
        numbers = range(offer.last - offer.count + 1, offer.last + 1)
        self._refuse(self._producers[offer.put.producer], numbers, reason)
        return [Refused(request, reason, accepted=offer.taken) for request in offer.requests]

    @staticmethod
    def _refuse(producer: _Producer, numbers: range, reason: Refusal) -> None:
        producer.refused.update(dict.fromkeys(numbers, reason))
        for old in list(islice(producer.refused, max(len(producer.refused) - REMEMBERED, 0))):
            del producer.refused[old]


def _behind(runs: Sequence[Run], count: int) -> list[Run]:
    """What is behind the first so many items."""
    left: list[Run] = []
    for run in runs:
        known = min(count, run.count)
        count -= known
        if known < run.count:
            if known:
                run.split(known)
            left.append(run)
    return left
