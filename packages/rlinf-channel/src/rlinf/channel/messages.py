"""What the queue is told (events) and what it answers (commands): frozen data, no behaviour.

Times are seconds on one monotonic clock, the server's. `request` numbers are chosen by the
caller and come back in the answer; each is answered once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rlinf.channel.run import Run
from rlinf.channel.spans import Ranges


class ClientId(NamedTuple):
    """One producer or consumer: a worker, its incarnation, and which of its channel objects."""

    worker: str
    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.worker}#{self.number}"


class Outcome(Enum):
    """How a consumer settles what it was given."""

    DONE = "done"
    """Worked on: forget it."""
    REJECTED = "rejected"
    """Unusable: forget it and count it apart."""
    RETURNED = "returned"
    """Not worked on: back to the front."""
    DEAD = "dead"
    """Given back too often: kept aside. Decided by the queue, not by a consumer."""


@dataclass(frozen=True, slots=True)
class Put:
    """A producer offers items numbered `first`, `first + 1`, ...; each number is used once."""

    request: int
    """0: nobody waits for the answer (any more)."""
    producer: ClientId
    first: int
    runs: Sequence[Run]
    """Its own: the queue takes them over."""
    deadline: float | None = None
    """When to answer `Refused(FULL)` for what had no room by then."""
    atomic: bool = False
    """All or nothing, and more than the bound only into an empty channel: for a commit."""
    void: "Refusal | None" = None
    """Use the numbers up and refuse with this reason: for a commit whose inputs are gone
    (LEASE_LOST), or where the spool has no space (NO_SPACE)."""

    @property
    def count(self) -> int:
        """How many items."""
        return sum([run.count for run in self.runs])


@dataclass(frozen=True, slots=True)
class Take:
    """A consumer asks for items.

    Without `full`: from 1 to `max_items`, at once if there are any (one asked for, the rest
    brought along). With `full`: a whole batch, which is `max_items` items, or as many as weigh
    at most `target_weight` (a heavier one alone), whichever is reached first; with neither,
    everything until the channel is closed.
    """

    request: int
    consumer: ClientId
    max_items: int | None = 1
    target_weight: float | None = None
    full: bool = False
    key: str | None = None
    deadline: float | None = None
    wait: bool = True
    """False: answer at once, with nothing if there is nothing."""
    done: Ranges = ()
    """Tags that are settled by asking again: nobody else is served between the two."""
    along: int = 0
    """With `full` and `max_items`: so many more may come along, by whole batches."""
    holds: int | None = None
    """How many items the consumer knows it holds. Where the server has given it more, the rest is
    on its way back, and the channel is not drained. None: all it was given."""
    ask: int = 0
    """The consumer's own number of this request, above that of every earlier one; see `Renew`."""
    alone: bool = True
    """Nothing that the consumer holds is settled before this is answered."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A consumer announces its relative speed."""

    consumer: ClientId
    capacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Settle:
    """A consumer settles items it was given, by their tags."""

    request: int | None
    consumer: ClientId
    tags: Ranges
    outcome: Outcome = Outcome.DONE


@dataclass(frozen=True, slots=True)
class Recalled:
    """The answer to `Recall`: these tags were not begun and come back."""

    consumer: ClientId
    tags: Ranges = ()


@dataclass(frozen=True, slots=True)
class Renew:
    """A consumer lives and still holds `tags`; answered with the number of those it does not.

    What it was given longer ago than half a lease and does not list never reached it: it goes
    back to the queue. Unless it was the answer to a request in `asks`, whose answers the consumer
    has not seen: it may have been stopped since, and finds them when it goes on.
    """

    request: int | None
    consumer: ClientId
    tags: Ranges = ()
    asks: Ranges = ()


@dataclass(frozen=True, slots=True)
class Resume:
    """A producer goes on after its server was restarted.

    Of its numbers below `next` only those `outstanding` may still come;
    every other one is settled, whether this server knows it or not.
    """

    producer: ClientId
    next: int
    outstanding: Ranges = ()


@dataclass(frozen=True, slots=True)
class Gone:
    """An incarnation of a worker is lost, with every client in it."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for the answer to this request any more."""

    request: int


@dataclass(frozen=True, slots=True)
class Close:
    """No more puts. What has already arrived, even if it waits for room, still counts."""

    request: int | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Put outputs into `target` and settle `tags` of `source` as done, both or neither."""

    source: str
    target: str
    consumer: ClientId
    tags: Ranges
    put: Put


Event = Put | Take | Attach | Settle | Recalled | Renew | Resume | Gone | Cancel | Close | Tick


class Refusal(Enum):
    """Why a request was not carried out."""

    CLOSED = "closed"
    FULL = "full"
    STANDSTILL = "standstill"
    """Nobody will make room before the put is let in."""
    TIMEOUT = "timeout"
    LEASE_LOST = "lease lost"
    CANCELLED = "cancelled"
    NO_SPACE = "no space"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The items of a put are held. `room_*`: what else would fit now; None: no bound.

    `held`: items in the channel, queued and leased.
    """

    request: int
    room_items: int | None
    room_bytes: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class Delivered:
    """The consumer is given `runs`, whose items are tagged `first_tag`, `first_tag + 1`, ...

    `held`: items in the channel, queued and leased, these included.
    """

    request: int
    consumer: ClientId
    first_tag: int
    runs: Sequence[Run]
    held: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """Done; `lost` counts the tags which the consumer no longer held."""

    request: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """Not done, and why; `accepted` items of a put had been taken in before."""

    request: int
    reason: Refusal
    accepted: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the consumer to give back what it has not begun: others wait with nothing to do."""

    consumer: ClientId


@dataclass(frozen=True, slots=True)
class Released:
    """These tags went back to the queue, because the consumer was lost or its lease ran out."""

    consumer: ClientId
    tags: Ranges = ()
    expired: bool = False


@dataclass(frozen=True, slots=True)
class Buried:
    """Items went back for the last time: they are kept aside, and nobody gets them any more."""

    consumer: ClientId
    run: Run


@dataclass(frozen=True, slots=True)
class Left:
    """Items have left the channel: whoever keeps something for them need not any longer."""

    runs: Sequence[Run]


Command = Accepted | Delivered | Settled | Refused | Recall | Released | Buried | Left
