"""The device lock as pure decisions: who may use which devices now. No clock and no I/O.

- All of a set or none of it, so nobody holds one device while waiting for another: a cycle of
  waiters cannot form.
- Among waiters whose sets overlap, the lowest order first (`(iteration, stage position)`, so
  upstream first); equal orders in the order of arrival. A waiter reserves its devices against
  everyone behind it, so a large set is not starved by small ones.
- Whoever releases may stay on its devices (`Release.stays`) until somebody who does not fit beside
  it is next: that one waits until it has left.
- A grant is leased and carries a fencing token, larger than every token before it. It ends when
  it is released, when its holder's incarnation is lost, or when its lease runs out.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlinf.channel.journal import Freed, Held, Record
from rlinf.channel.messages import Cancel, ClientId, Gone, Refusal, Refused, Settled, Tick
from rlinf.channel.residents import Resident, Residents
from rlinf.channel.statistics import Holder, LockStatistics


@dataclass(frozen=True, slots=True)
class Acquire:
    """A client wants all of `devices`; answered by `Granted` or `Refused`.

    A client asks for one grant at a time: one that asks while it has a grant does not know of it
    (the answer was lost), and that grant ends.
    """

    request: int
    client: ClientId
    devices: frozenset[str]
    order: tuple[int, ...]
    deadline: float | None = None
    nbytes: int = 0
    """What it will have on each of the devices; 0: not known, so nobody may stay beside it."""
    room_bytes: int = 0
    """What there is on each of them."""


@dataclass(frozen=True, slots=True)
class Release:
    """The holder of `token` is done; answered by `Settled` (lost: 1 if it no longer held it)."""

    request: int | None
    token: int
    stays: int | None = 0
    """Bytes that it leaves on each of the devices, until it is asked to leave. None: the grant was
    not used, and what was there before still is."""


@dataclass(frozen=True, slots=True)
class Vacated:
    """Who stayed after this grant has left its devices, or is beyond asking."""

    token: int


@dataclass(frozen=True, slots=True)
class Keep:
    """The holder of `token` lives; answered by `Settled` (lost: 1 if it no longer holds it)."""

    request: int | None
    token: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The devices are this client's until it releases `token`."""

    request: int
    token: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A grant ended without a release."""

    token: int
    client: ClientId
    expired: bool


@dataclass(frozen=True, slots=True)
class Vacate:
    """Ask who stayed after this grant to leave its devices; `Vacated` is the answer."""

    token: int
    client: ClientId


@dataclass(frozen=True, slots=True)
class Denied:
    """The deadline came first: who held the devices or stayed there, and who stood before."""

    request: int
    holders: tuple[Holder, ...]
    ahead: tuple[Holder, ...]


LockEvent = Acquire | Release | Vacated | Keep | Gone | Cancel | Tick
LockCommand = Granted | Denied | Settled | Refused | Ended | Vacate


@dataclass(slots=True)
class _Grant:
    acquire: Acquire
    token: int
    since: float
    expires_at: float


@dataclass(slots=True)
class _Waiter:
    acquire: Acquire
    arrival: int
    since: float


class LockCore:
    """Every device of one server. Not thread-safe: its owner serialises the steps.

    Args:
        lease_s: A grant ends when its holder is silent for so long.
        first_token: Tokens count up from here: above those of an earlier server of this name.
        journal: Where to append what must outlive the server; None: nothing must.
    """

    def __init__(
        self, lease_s: float, *, first_token: int = 0, journal: list[Record] | None = None
    ) -> None:
        self._lease_s = lease_s
        self._journal = journal
        self._grants: dict[int, _Grant] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._residents = Residents()
        self._tokens = first_token
        self._granted = 0
        self._arrivals = 0
        self._lost = 0
        self.wake_at = math.inf
        self._handlers: dict[type, Callable[..., list[LockCommand]]] = {
            Acquire: self._on_acquire,
            Release: self._on_release,
            Vacated: self._on_vacated,
            Keep: self._on_keep,
            Gone: self._on_gone,
            Cancel: self._on_cancel,
            Tick: self._on_tick,
        }

    def step(self, event: LockEvent, now: float) -> list[LockCommand]:
        """Take one event in; what to answer to whom."""
        return self._handlers[type(event)](event, now) + self._grant(now)

    def load(self, grants: Iterable[Held], now: float) -> None:
        """Go on with the grants of another server, as a lock that was just made.

        Their holders have a whole lease to show that they live.
        """
        for held in grants:
            acquire = Acquire(0, held.client, frozenset(held.devices), held.order)
            self._grants[held.token] = _Grant(acquire, held.token, now, now + self._lease_s)
            self._tokens = max(self._tokens, held.token)
            self.wake_at = now + self._lease_s

    def save(self) -> dict[int, Held]:
        """The grants that a restarted server must know."""
        return {g.token: _held(g.acquire, g.token) for g in self._grants.values()}

    def statistics(self, now: float) -> LockStatistics:
        """Who holds what and who waits, first in line first."""
        holders = tuple(
            self._picture(g.acquire, g.token, now - g.since) for g in self._grants.values()
        )
        waiters = tuple(self._picture(w.acquire, 0, now - w.since) for w in self._line())
        back = {grant.acquire.client for grant in self._grants.values()}
        residents = tuple(self._there(r, now) for r in self._residents if r.client not in back)
        return LockStatistics(holders, waiters, self._granted, self._lost, residents)

    def _on_acquire(self, acquire: Acquire, now: float) -> list[LockCommand]:
        for grant in [g for g in self._grants.values() if g.acquire.client == acquire.client]:
            self._on_release(Release(None, grant.token, None), now)
        self._waiters[acquire.request] = _Waiter(acquire, self._arrivals, now)
        self._arrivals += 1
        if acquire.deadline is not None:
            self.wake_at = min(self.wake_at, acquire.deadline)
        return []

    def _on_release(self, release: Release, now: float) -> list[LockCommand]:
        grant = self._grants.pop(release.token, None)
        if grant is not None:
            if self._journal is not None:
                self._journal.append(Freed(release.token))
            acquire = grant.acquire
            if release.stays is not None:
                self._residents.forget(acquire.client)
            if release.stays:
                place = acquire.client, acquire.devices, acquire.order
                self._residents.stay(Resident(release.token, *place, release.stays, now))
        return [] if release.request is None else [Settled(release.request, int(grant is None))]

    def _on_vacated(self, vacated: Vacated, now: float) -> list[LockCommand]:
        self._residents.leave(vacated.token)
        return []

    def _on_keep(self, keep: Keep, now: float) -> list[LockCommand]:
        grant = self._grants.get(keep.token)
        if grant is not None:
            grant.expires_at = now + self._lease_s
        return [] if keep.request is None else [Settled(keep.request, int(grant is None))]

    def _on_gone(self, gone: Gone, now: float) -> list[LockCommand]:
        dead = (gone.worker, gone.epoch)
        ended = [g for g in self._grants.values() if g.acquire.client[:2] == dead]
        left = [w for w in self._waiters.values() if w.acquire.client[:2] == dead]
        for waiter in left:
            del self._waiters[waiter.acquire.request]
        self._residents.forget_worker(gone.worker, gone.epoch)
        refused = [Refused(w.acquire.request, Refusal.CANCELLED) for w in left]
        return [*self._end(ended, expired=False), *refused]

    def _on_cancel(self, cancel: Cancel, now: float) -> list[LockCommand]:
        if self._waiters.pop(cancel.request, None) is None:
            return []
        return [Refused(cancel.request, Refusal.CANCELLED)]

    def _on_tick(self, tick: Tick, now: float) -> list[LockCommand]:
        late = [
            w.acquire
            for w in self._waiters.values()
            if w.acquire.deadline is not None and w.acquire.deadline <= now
        ]
        commands: list[LockCommand] = [self._deny(acquire, now) for acquire in late]
        for acquire in late:
            del self._waiters[acquire.request]
        expired = [g for g in self._grants.values() if g.expires_at <= now]
        commands += self._end(expired, expired=True)
        times = [g.expires_at for g in self._grants.values()]
        waits = [w.acquire.deadline for w in self._waiters.values()]
        self.wake_at = min(times + [t for t in waits if t is not None], default=math.inf)
        return commands

    def _end(self, grants: list[_Grant], *, expired: bool) -> list[LockCommand]:
        for grant in grants:
            del self._grants[grant.token]
            self._residents.forget(grant.acquire.client)
            if self._journal is not None:
                self._journal.append(Freed(grant.token))
        self._lost += len(grants)
        return [Ended(g.token, g.acquire.client, expired) for g in grants]

    def _deny(self, acquire: Acquire, now: float) -> Denied:
        state = self.statistics(now)
        there = (*state.holders, *state.residents)
        holders = tuple(h for h in there if not acquire.devices.isdisjoint(h.devices))
        ahead: list[Holder] = []
        for waiter, picture in zip(self._line(), state.waiters, strict=True):
            if waiter.acquire.request == acquire.request:
                break
            if not acquire.devices.isdisjoint(picture.devices):
                ahead.append(picture)
        return Denied(acquire.request, holders, tuple(ahead))

    def _line(self) -> list[_Waiter]:
        return sorted(self._waiters.values(), key=lambda w: (w.acquire.order, w.arrival))

    def _grant(self, now: float) -> list[LockCommand]:
        if not self._waiters:
            return []
        taken = {device for grant in self._grants.values() for device in grant.acquire.devices}
        commands: list[LockCommand] = []
        for waiter in self._line():
            acquire = waiter.acquire
            leaving = self._leaving(acquire) if taken.isdisjoint(acquire.devices) else None
            if leaving:
                asked = self._residents.to_ask(leaving)
                commands += [Vacate(r.token, r.client) for r in asked]
            elif leaving is not None:
                self._tokens += 1
                self._granted += 1
                if self._journal is not None:
                    self._journal.append(_held(acquire, self._tokens))
                grant = _Grant(acquire, self._tokens, now, now + self._lease_s)
                self._grants[self._tokens] = grant
                self.wake_at = min(self.wake_at, grant.expires_at)
                del self._waiters[acquire.request]
                commands.append(Granted(acquire.request, self._tokens))
            taken |= acquire.devices
        return commands

    def _leaving(self, acquire: Acquire) -> list[Resident]:
        return self._residents.in_the_way(
            acquire.client, acquire.devices, acquire.nbytes, acquire.room_bytes
        )

    @staticmethod
    def _there(resident: Resident, now: float) -> Holder:
        devices = tuple(sorted(resident.devices))
        return Holder(
            str(resident.client), devices, resident.order, resident.token, now - resident.since
        )

    @staticmethod
    def _picture(acquire: Acquire, token: int, since_s: float) -> Holder:
        devices = tuple(sorted(acquire.devices))
        return Holder(str(acquire.client), devices, acquire.order, token, since_s)


def _held(acquire: Acquire, token: int) -> Held:
    return Held(token, acquire.client, tuple(sorted(acquire.devices)), acquire.order)
