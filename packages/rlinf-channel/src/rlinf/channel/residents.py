"""Who stays on devices between its grants: pure decisions.

Whoever ends a grant may leave what it has on the devices, and finds it there the next time. Before
somebody else is granted a common device, as many leave as have no room there beside it, those who
came first of all first.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rlinf.channel.messages import ClientId


class Resident(NamedTuple):
    """What a client has left on devices."""

    token: int
    """Of the grant after which it stayed."""
    client: ClientId
    devices: frozenset[str]
    order: tuple[int, ...]
    nbytes: int
    """On each of the devices."""
    since: float


class Residents:
    """Everybody who stays."""

    def __init__(self) -> None:
        self._known: dict[int, Resident] = {}
        self._asked: set[int] = set()

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._known.values())

    def stay(self, resident: Resident) -> None:
        """Its grant has ended, and it has not left."""
        self._known[resident.token] = resident

    def leave(self, token: int) -> None:
        """It has left."""
        self._known.pop(token, None)
        self._asked.discard(token)

    def forget(self, client: ClientId) -> None:
        """What it had there is there no longer, or counts anew."""
        for resident in [r for r in self if r.client == client]:
            self.leave(resident.token)

    def forget_worker(self, worker: str, epoch: int) -> None:
        """An incarnation of a worker is gone, with all it had."""
        for resident in [r for r in self if r.client[:2] == (worker, epoch)]:
            self.leave(resident.token)

    def in_the_way(
        self, client: ClientId, devices: frozenset[str], nbytes: int, room_bytes: int
    ) -> list[Resident]:
        """Who has to leave before this client may use the devices.

        Args:
            client: Who wants them.
            devices: Which.
            nbytes: What it will have on each of them; 0: not known, so nobody else has room.
            room_bytes: What there is on each of them.
        """
        leaving: dict[int, Resident] = {}
        for device in devices:
            there = [r for r in self if device in r.devices and r.client != client]
            needed = nbytes + sum([r.nbytes for r in there])
            for resident in there:
                if nbytes and needed <= room_bytes:
                    break
                leaving[resident.token] = resident
                needed -= resident.nbytes
        return list(leaving.values())

    def to_ask(self, leaving: list[Resident]) -> list[Resident]:
        """Those of them who were not asked to leave before."""
        new = [r for r in leaving if r.token not in self._asked]
        self._asked.update(r.token for r in new)
        return new
