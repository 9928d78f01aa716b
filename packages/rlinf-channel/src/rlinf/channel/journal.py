"""What must outlive a server: records of what it took in and let go, and the state they add up to.

Only what was promised is recorded: an item once it is admitted (its producer is told after that),
a settlement before its consumer is told, a grant of the device lock before its holder is told.
What waits for room is the producer's still, and a lease ends with the server that gave it. So
`replay` of any prefix of the records is a state the server could have stopped in.

Each `Hub` or `LockCore` step appends its records to a list; what one step appends is one unit:
all of it is kept, or none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlinf.channel.config import ChannelConfig
from rlinf.channel.messages import ClientId, Outcome
from rlinf.channel.run import Run
from rlinf.channel.spans import Ranges, RunMap, Spans, length

REMEMBERED_RUNS = 256
"""Of each consumer's settled tags so many runs are known after a restart, for a settlement whose
answer was lost."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A channel was created. `birth` tells it from others of its name."""

    channel: str
    birth: int
    config: ChannelConfig


@dataclass(frozen=True, slots=True)
class Closed:
    """No more puts."""

    channel: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """The channel is forgotten."""

    channel: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Items number `first`, ... of a producer are in the channel, in orders `order`, ..."""

    channel: str
    producer: ClientId
    first: int
    order: int
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Finished:
    """The items of these orders have left the queue (or are dead: kept aside)."""

    channel: str
    consumer: ClientId
    tags: Ranges
    orders: Ranges
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Held:
    """A grant of the device lock."""

    token: int
    client: ClientId
    devices: tuple[str, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """A grant has ended."""

    token: int


Record = Opened | Closed | Deleted | Admitted | Finished | Held | Freed


@dataclass(slots=True)
class ProducerState:
    """The next number of a producer, and the numbers below it that were refused (or never came)."""

    next: int = 0
    refused: Ranges = ()


@dataclass(slots=True)
class ChannelState:
    """One channel between two lives of its server. Items by order."""

    name: str
    birth: int
    config: ChannelConfig
    closed: bool = False
    orders: int = 0
    """How many orders have been given out."""
    acknowledged: int = 0
    rejected: int = 0
    producers: dict[ClientId, ProducerState] = field(default_factory=dict)
    items: RunMap = field(default_factory=RunMap)
    dead: RunMap = field(default_factory=RunMap)
    settled: dict[ClientId, Spans] = field(default_factory=dict)
    """The latest tags each consumer has settled."""

    def admit(self, record: Admitted) -> None:
        """Take items in again."""
        producer = self.producers.setdefault(record.producer, ProducerState())
        if record.first > producer.next:
            producer.refused += (producer.next, record.first - 1)
        order = record.order
        for run in record.runs:
            run.order = order
            self.items.add(order, run)
            order += run.count
        producer.next = record.first + order - record.order
        self.orders = order

    def finish(self, record: Finished) -> None:
        """Let items go again."""
        gone, _ = self.items.cut(record.orders)
        if record.outcome is Outcome.DEAD:
            for run in gone:
                self.dead.add(run.order, run)
        elif record.outcome is Outcome.DONE:
            self.acknowledged += length(record.orders)
        else:
            self.rejected += length(record.orders)
        if record.tags:
            settled = self.settled.setdefault(record.consumer, Spans())
            settled.update(record.tags)
            settled.keep_latest(REMEMBERED_RUNS)


@dataclass(slots=True)
class ServerState:
    """Everything a server goes on with."""

    channels: dict[str, ChannelState] = field(default_factory=dict)
    grants: dict[int, Held] = field(default_factory=dict)

    def replay(self, records: Iterable[Record]) -> None:
        """Add what records say."""
        for record in records:
            match record:
                case Opened(channel, birth, config):
                    self.channels[channel] = ChannelState(channel, birth, config)
                case Closed(channel):
                    self.channels[channel].closed = True
                case Deleted(channel):
                    del self.channels[channel]
                case Admitted():
                    self.channels[record.channel].admit(record)
                case Finished():
                    self.channels[record.channel].finish(record)
                case Held():
                    self.grants[record.token] = record
                case Freed():
                    self.grants.pop(record.token, None)
