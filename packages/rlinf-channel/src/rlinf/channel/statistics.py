"""What a channel, a lock and a server say about themselves: frozen pictures."""

from dataclasses import dataclass

MOST_LISTED = 64


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """One consumer of one channel."""

    id: str
    capacity: float
    leased_items: int
    outstanding_weight: float
    """Given and not yet acknowledged."""
    finished_items: int
    finished_weight: float
    weight_per_s: float
    """Recent pace over completions; 0 until the first."""
    idle_s: float
    """Time spent holding nothing since it first asked."""
    redelivered: int
    """Items it was given which another (or itself) had been given before."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody whose request at a channel is not answered yet."""

    id: str
    operation: str
    """put, take or commit."""
    since_s: float
    """Seconds it has waited."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """One channel."""

    name: str
    policy: str
    max_items: int | None
    """The bound on `depth`; None: only bytes are bounded."""
    max_bytes: int
    """The bound on `held_bytes`."""
    depth: int
    """Items queued; leased ones are not in it."""
    leased_items: int
    held_bytes: int
    """Queued and leased together."""
    put_items: int
    """Ever taken in."""
    put_bytes: int
    acknowledged_items: int
    rejected_items: int
    redelivered_items: int
    """Went back to the queue after having been given to a consumer."""
    dead_items: int
    """Given back too often: kept aside, see `Channel.dead_letters`."""
    duplicate_items: int
    """Repeated messages, dropped."""
    waiting_producers: int
    waiting_consumers: int
    closed: bool
    consumers: tuple[ConsumerStatistics, ...]
    waiting: tuple[Waiting, ...] = ()
    """Who waits, the longest first; at most `MOST_LISTED` are named."""
    hit_rate: float | None = None
    """Of the items that stay on the accelerator of whoever asks: the share that was there when it
    was needed. None where it has put none of that kind."""

    @property
    def balance(self) -> float:
        """Most over least finished weight per capacity among consumers; 1 is even, inf is idle."""
        done = [c.finished_weight / c.capacity for c in self.consumers]
        if not done or max(done) == 0:
            return 1.0
        return max(done) / min(done) if min(done) else float("inf")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds, or waits for, a set of devices."""

    id: str
    devices: tuple[str, ...]
    order: tuple[int, ...]
    token: int
    """The fencing token; 0 while it waits."""
    since_s: float
    """Seconds it has held, or waited."""

    def __str__(self) -> str:
        order = ".".join(map(str, self.order))
        return f"{self.id} ({', '.join(self.devices)}; order {order}; {self.since_s:.1f} s)"


@dataclass(frozen=True, slots=True)
class LockStatistics:
    """The device lock of one server."""

    holders: tuple[Holder, ...]
    waiters: tuple[Holder, ...]
    grants: int
    lost: int
    """Grants ended by the loss of their holder or the end of their lease."""
    residents: tuple[Holder, ...] = ()
    """Who has left something on devices after its grant, which its token names."""


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Everything one channel server holds."""

    server: str
    up_s: float
    """Seconds since it began to serve."""
    channels: tuple[ChannelStatistics, ...]
    lock: LockStatistics
