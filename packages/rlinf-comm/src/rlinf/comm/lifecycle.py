"""Lifecycle: the connection to one peer as a state machine. No I/O, no clock.

    ABSENT --Wanted--> RESOLVING --Resolved--> DIALLING --Welcomed--> UP
      any  --Proved (the peer dialled us)--> UP       UP --LinkLost--> ABSENT

When both dial at once, the connection dialled by the smaller id stays: the smaller refuses the
other's (DUPLICATE), the larger drops its own and accepts. Whoever is refused waits a little for
the other's connection, then tries again, so a dial that fails costs a delay and not a deadlock.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from rlinf.comm.handshake import Refusal

BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.25
DEAD_AFTER_S = 0.6


class Phase(Enum):
    """Where the connection stands."""

    ABSENT = auto()
    RESOLVING = auto()
    DIALLING = auto()
    PAUSING = auto()
    UP = auto()


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody has something to send."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The registry knows the peer; `epoch` 0: any incarnation."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Unresolved:
    """The registry does not, and its deadline has passed."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Proved:
    """A link the peer dialled has authenticated."""

    link: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The peer has accepted the link we dialled."""

    link: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The peer has refused the link we dialled."""

    link: int
    code: Refusal
    text: str


@dataclass(frozen=True, slots=True)
class DialFailed:
    """The link we dialled did not come about; `final`: trying again is of no use."""

    link: int
    error: BaseException
    final: bool = False


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A link that was up is gone; `idle`: it was closed because nobody used it."""

    link: int
    reason: str
    clean: bool
    idle: bool = False


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The pause a `RetryAt` asked for is over."""


Event = (
    Wanted | Resolved | Unresolved | Proved | Welcomed | Refused | DialFailed | LinkLost | RetryDue
)

# -- commands ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resolve:
    """Ask the registry; `fresh`: not the cached record."""

    fresh: bool


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial the peer, asking for this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Send `RetryDue` at that time."""

    when: float


@dataclass(frozen=True, slots=True)
class Accept:
    """Welcome this link of the peer's."""

    link: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse this link of the peer's."""

    link: int
    code: Refusal


@dataclass(frozen=True, slots=True)
class Drop:
    """Close this link of ours."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Write something to the link, so that a dead one is noticed."""

    link: int


@dataclass(frozen=True, slots=True)
class Up:
    """The link is the connection: announce it, send what waits."""

    link: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Down:
    """The connection to this incarnation is over."""

    epoch: int
    reason: str
    clean: bool
    idle: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing that waits to be sent can be; `error` None: the peer is dead (`reason`)."""

    reason: str
    error: BaseException | None = None


Command = Resolve | Dial | RetryAt | Accept | Refuse | Drop | Ping | Up | Down | Fail


# -- the machine -------------------------------------------------------------------------------


class Lifecycle:
    """The connection to one peer.

    Args:
        first: Whether this side's id is the smaller one, so that its dial goes first.
    """

    def __init__(self, *, first: bool) -> None:
        self.phase = Phase.ABSENT
        self.link = 0
        self.epoch = 0
        self._first = first
        self._dialling = 0
        self._pause_s = BACKOFF_S
        self._failing_since: float | None = None

    def dialled(self, link: int) -> None:
        """Tell the machine the number of the link that a `Dial` command made."""
        self._dialling = link

    def step(self, event: Event, now: float) -> list[Command]:
        """Take one event; returns what is to be done, in order."""
        commands: list[Command] = _STEPS[type(event)](self, event, now)
        return commands

    def _wanted(self, _: Wanted, now: float) -> list[Command]:
        if self.phase is not Phase.ABSENT:
            return []
        self.phase = Phase.RESOLVING
        self._failing_since = None
        self._pause_s = BACKOFF_S
        return [Resolve(fresh=False)]

    def _resolved(self, event: Resolved, now: float) -> list[Command]:
        if self.phase is not Phase.RESOLVING:
            return []
        self.phase = Phase.DIALLING
        self._dialling = 0
        return [Dial(event.epoch)]

    def _unresolved(self, event: Unresolved, now: float) -> list[Command]:
        if self.phase is not Phase.RESOLVING:
            return []
        self.phase = Phase.ABSENT
        return [Fail(str(event.error), event.error)]

    def _proved(self, event: Proved, now: float) -> list[Command]:
        if event.epoch < self.epoch:
            return [Refuse(event.link, Refusal.STALE)]
        if self.phase is Phase.UP:
            if event.epoch == self.epoch:
                return [Refuse(event.link, Refusal.DUPLICATE), Ping(self.link)]
            old = self.link
            down = Down(self.epoch, "restarted under the same name", clean=False, idle=False)
            return [Drop(old, "replaced"), down, *self._up(event.link, event.epoch, accept=True)]
        commands: list[Command] = []
        if self.phase is Phase.DIALLING and self._dialling:
            if self._first:
                return [Refuse(event.link, Refusal.DUPLICATE)]
            commands.append(Drop(self._dialling, "the peer's own connection goes first"))
        return [*commands, *self._up(event.link, event.epoch, accept=True)]

    def _up(self, link: int, epoch: int, *, accept: bool) -> list[Command]:
        self.phase = Phase.UP
        self.link, self.epoch, self._dialling = link, epoch, 0
        self._failing_since = None
        self._pause_s = BACKOFF_S
        first: list[Command] = [Accept(link)] if accept else []
        return [*first, Up(link, epoch)]

    def _welcomed(self, event: Welcomed, now: float) -> list[Command]:
        if self.phase is not Phase.DIALLING or event.link != self._dialling:
            return [Drop(event.link, "no longer wanted")]
        return self._up(event.link, event.epoch, accept=False)

    def _refused(self, event: Refused, now: float) -> list[Command]:
        if self.phase is not Phase.DIALLING or event.link != self._dialling:
            return []
        if event.code in (Refusal.VERSION, Refusal.TOKEN, Refusal.STALE):
            self.phase, self._dialling = Phase.ABSENT, 0
            return [Fail(event.text)]
        if event.code is Refusal.DUPLICATE:
            return self._pause(now)
        return self._retry(event.text, now)

    def _dial_failed(self, event: DialFailed, now: float) -> list[Command]:
        if self.phase is not Phase.DIALLING or (event.link and event.link != self._dialling):
            return []
        if event.final:
            self.phase, self._dialling = Phase.ABSENT, 0
            return [Fail(str(event.error), event.error)]
        return self._retry(str(event.error), now)

    def _retry(self, reason: str, now: float) -> list[Command]:
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= DEAD_AFTER_S:
            self.phase, self._dialling = Phase.ABSENT, 0
            return [Fail(reason)]
        return self._pause(now)

    def _pause(self, now: float) -> list[Command]:
        self.phase, self._dialling = Phase.PAUSING, 0
        when = now + self._pause_s
        self._pause_s = min(MAX_BACKOFF_S, 2 * self._pause_s)
        return [RetryAt(when)]

    def _retry_due(self, _: RetryDue, now: float) -> list[Command]:
        if self.phase is not Phase.PAUSING:
            return []
        self.phase = Phase.RESOLVING
        return [Resolve(fresh=True)]

    def _link_lost(self, event: LinkLost, now: float) -> list[Command]:
        if self.phase is Phase.UP and event.link == self.link:
            self.phase, self.link = Phase.ABSENT, 0
            return [Down(self.epoch, event.reason, event.clean, event.idle)]
        return []


_STEPS: dict[type, Any] = {
    Wanted: Lifecycle._wanted,
    Resolved: Lifecycle._resolved,
    Unresolved: Lifecycle._unresolved,
    Proved: Lifecycle._proved,
    Welcomed: Lifecycle._welcomed,
    Refused: Lifecycle._refused,
    DialFailed: Lifecycle._dial_failed,
    LinkLost: Lifecycle._link_lost,
    RetryDue: Lifecycle._retry_due,
}
