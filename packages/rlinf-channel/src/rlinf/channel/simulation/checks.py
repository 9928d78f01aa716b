"""What must hold in every schedule, by what is written and what is answered."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rlinf.channel.config import ChannelConfig
from rlinf.channel.hub import Hub
from rlinf.channel.journal import Admitted, Finished, Record
from rlinf.channel.messages import (
    ClientId,
    Command,
    Commit,
    Delivered,
    Event,
    Outcome,
    Recalled,
    Released,
    Settle,
    Take,
)
from rlinf.channel.simulation.things import Thing, things_of
from rlinf.channel.spans import Ranges, expand, length

MAX_NBYTES = 9
"""No simulated item is larger."""


class Checks:
    """What must hold, by what is written and what is answered."""

    def __init__(self, config: ChannelConfig, counts: Counter[str]) -> None:
        self._config = config
        self._counts = counts
        # An atomic commit may exceed the bound.
        self._bound = max(config.buffer_bytes, 3 * MAX_NBYTES)
        self.accepted: set[str] = set()
        """Names whose producer was told that they are in."""
        self.refused: set[str] = set()
        """Names whose producer was told that they are not."""
        self.admitted: dict[str, dict[str, int]] = {"in": {}, "out": {}}
        """By channel and name: its order."""
        self.finished: dict[str, set[int]] = {"in": set(), "out": set()}
        self.dead: set[int] = set()
        self._leases: dict[str, dict[int, tuple[ClientId, int]]] = {"in": {}, "out": {}}
        """By channel and tag: who holds which order."""
        self._delivered: set[tuple[str, int]] = set()
        self._in_vain: set[tuple[ClientId, int]] = set()
        self._last: dict[tuple[str, str | None], int] = {}

    def written(self, records: Sequence[Record], hub: Hub) -> None:
        """What is on the disk now cannot be taken back."""
        for record in records:
            if isinstance(record, Admitted):
                known = self.admitted[record.channel]
                for order, item in enumerate(things_of(record.runs), start=record.order):
                    name = str(item.payload)
                    assert name not in known, f"{name} is in '{record.channel}' twice"
                    known[name] = order
                self._check_bounds(hub)
            elif isinstance(record, Finished):
                done = self.finished[record.channel]
                twice = done.intersection(expand(record.orders))
                assert not twice, f"orders {twice} of '{record.channel}' finished twice"
                done.update(expand(record.orders))
                if record.outcome is Outcome.DEAD:
                    assert self._config.max_deliveries, "buried without need"
                    self.dead.update(expand(record.orders))
                    self._counts["dead items"] += length(record.orders)

    def settled(self, channel: str, event: Event | Commit) -> None:
        """A consumer lets go of what it holds."""
        tags: Ranges = ()
        if isinstance(event, Settle | Recalled):
            tags = event.tags
        elif isinstance(event, Take):
            tags = event.done
        else:
            return
        for tag in expand(tags):
            if self._leases[channel].get(tag, (None,))[0] == event.consumer:
                del self._leases[channel][tag]

    def forget_leases(self) -> None:
        """Leases end with the server."""
        self._leases = {"in": {}, "out": {}}

    def held(self, channel: str, consumer: ClientId, held: Mapping[int, Thing]) -> None:
        """What a consumer has just been given is its, and nobody else's."""
        leases = self._leases[channel]
        lost = [i.payload for tag, i in held.items() if leases.get(tag) != (consumer, i.order)]
        assert not lost, f"{lost} came to {consumer} and had been taken from it on the way"

    def released(self, released: Released, held: Mapping[int, Thing]) -> None:
        """A consumer that was never silent for a lease has lost nothing that came to it."""
        lost = [held[tag].payload for tag in expand(released.tags) if tag in held]
        assert not lost, f"{lost} was taken from {released.consumer}, which has renewed it"

    def command(self, channel: str, command: Command) -> None:
        """One answer of the server."""
        if isinstance(command, Released):
            self._counts["expired" if command.expired else "lost with their holder"] += 1
            for tag in expand(command.tags):
                self._leases[channel].pop(tag, None)
        elif isinstance(command, Delivered):
            self._check_delivery(channel, command)

    def _check_delivery(self, channel: str, delivered: Delivered) -> None:
        held = {order for _, order in self._leases[channel].values()}
        for tag, item in enumerate(things_of(delivered.runs), start=delivered.first_tag):
            assert item.order not in held, f"{item.payload} is held already: two holders"
            assert item.order not in self.finished[channel], f"{item.payload} comes after its end"
            self._leases[channel][tag] = delivered.consumer, item.order
            self._counts["redelivered"] += item.returns > 0
            if channel == "in" and (channel, item.order) not in self._delivered:
                self._delivered.add((channel, item.order))
                self._check_order(item)

    def _check_order(self, item: Thing) -> None:
        producer, _, number = str(item.payload).partition(":")
        last = self._last.get((producer, item.key), -1)
        assert int(number) > last, f"{item.payload} came after number {last} of its key"
        self._last[producer, item.key] = int(number)

    def _check_bounds(self, hub: Hub) -> None:
        bound = self._bound
        for queue in hub:
            held = queue.held_bytes
            assert held <= bound, f"'{queue.name}' holds {held} bytes of {bound}"

    def waited_in_vain(self, put: tuple[ClientId, int], able: set[ClientId]) -> None:
        """A put is refused for good only where nobody is able to make room.

        Args:
            put: Its producer and first number.
            able: Consumers that hold something and do not wait for more.
        """
        if put not in self._in_vain:  # else it is only told once more
            self._in_vain.add(put)
            self._counts["standstills"] += 1
            assert not able, f"{put} is refused, and {able} would have made room"

    def told_accepted(self, channel: str, names: Sequence[str]) -> None:
        """A producer is told that these are in."""
        missing = [name for name in names if name not in self.admitted[channel]]
        assert not missing, f"{missing} accepted by '{channel}', but not on its disk"
        if channel == "in":
            self.accepted.update(names)

    def told_done(self, channel: str, orders: Sequence[int]) -> None:
        """A consumer is told that its settlement counts."""
        missing = [order for order in orders if order not in self.finished[channel]]
        assert not missing, f"orders {missing} of '{channel}' acknowledged, but not on its disk"

    def at_the_end(self, hub: Hub, now: float) -> None:
        """Nothing lost, nothing twice, nothing left."""
        wrong = self.refused & set(self.admitted["in"])
        assert not wrong, f"refused and yet taken in: {sorted(wrong)}"
        for channel, known in self.admitted.items():
            left = [name for name, order in known.items() if order not in self.finished[channel]]
            assert not left, f"accepted by '{channel}', then lost: {sorted(left)}"
            queue = hub.get(channel)
            state = queue.statistics(now)
            assert state.closed and queue.drained, f"not drained: {state}"
            assert state.put_items == len(known), f"counts other items than {len(known)}: {state}"
            self._counts[f"{channel} items"] = state.put_items
            self._counts["duplicates"] += state.duplicate_items
        lost = self.accepted - set(self.admitted["in"])
        assert not lost, f"accepted, then lost: {sorted(lost)}"
