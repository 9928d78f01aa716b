"""Channel: the door. A named queue between producers and consumers in any process on any host."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from rlinf.channel.batching import Crate, cargos, shelve
from rlinf.channel.bond import Bond
from rlinf.channel.config import ChannelConfig
from rlinf.channel.consumer import Consumer
from rlinf.channel.dead import DeadLetter
from rlinf.channel.devices import Packer, open_cargo
from rlinf.channel.errors import InvalidConfig, ItemsLost
from rlinf.channel.inbox import Inbox
from rlinf.channel.link import Link, Reply, answered, send
from rlinf.channel.outbox import Outbox
from rlinf.channel.producer import Producer
from rlinf.channel.reunion import Reunion
from rlinf.channel.session import Session, session_of
from rlinf.channel.statistics import ChannelStatistics
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CodecError
from rlinf.comm.handle import DEFAULT, TimeoutLike

SERVER = "channel/0"


@dataclass(frozen=True, slots=True)
class ChannelRef:
    """A channel by name: what to send to other workers. Plain data."""

    name: str
    server: str = SERVER

    def open(self, endpoint: Endpoint, *, capacity: float = 1.0) -> "Channel":
        """Connect to it; see `Channel.connect`."""
        return Channel.connect(self.name, endpoint, server=self.server, capacity=capacity)


class Channel(Producer, Consumer):
    """One worker's access to a channel. Make it with `create` or `connect`.

    Each object is one producer and one consumer of its own. Threads may share it, but then they
    are one consumer together: a get by one acknowledges what another got before. For separate
    consumers open the channel once for each (`channel.ref.open(endpoint)`).
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        session = session_of(link.endpoint)
        self._packer = Packer(link, session)
        self._outbox = Outbox(link, session)
        self._inbox = Inbox(link, session)
        link.bond.join(self._outbox, self._inbox)
        session.before_end(-link.number, self._inbox.farewell)
        parts = session, self._inbox, self._outbox, link
        weakref.finalize(self, _forget, *parts).atexit = False

    @classmethod
    def create(
        cls,
        name: str,
        endpoint: Endpoint,
        config: ChannelConfig | None = None,
        *,
        server: str = SERVER,
        capacity: float = 1.0,
    ) -> "Channel":
        """Create the channel, or connect if it exists with the same configuration.

        Args:
            name: Unique on the server.
            endpoint: Whose worker puts and gets.
            config: None: the server's default for a new channel, any for an existing one.
            server: The worker that hosts the `ChannelServer`.
            capacity: Relative speed of this consumer, for the balancing policy.

        Raises:
            ConfigMismatch: It exists with another configuration.
            PolicyUnknown: The server has no policy `config.type`.
            ServerLost: The server cannot be reached.
        """
        [channel] = cls.create_all([name], endpoint, config, server=server, capacity=capacity)
        return channel

    @classmethod
    def create_all(
        cls,
        names: Sequence[str],
        endpoint: Endpoint,
        config: ChannelConfig | None = None,
        *,
        server: str = SERVER,
        capacity: float = 1.0,
    ) -> "tuple[Channel, ...]":
        """Create several channels alike, in the time that one takes; see `create`."""
        fields = None if config is None else asdict(config)
        places = [(name, server) for name in names]
        return cls._reach(places, endpoint, capacity, "create", fields)

    @classmethod
    def connect(
        cls, name: str, endpoint: Endpoint, *, server: str = SERVER, capacity: float = 1.0
    ) -> "Channel":
        """Connect to a channel that exists.

        Raises:
            ChannelUnknown: There is none of this name on the server.
            ServerLost: The server cannot be reached.
        """
        [channel] = cls._reach([(name, server)], endpoint, capacity, "connect")
        return channel

    @classmethod
    def connect_all(
        cls, refs: Sequence[ChannelRef], endpoint: Endpoint, *, capacity: float = 1.0
    ) -> "tuple[Channel, ...]":
        """Connect to several channels, in the time that one takes; see `connect`."""
        places = [(ref.name, ref.server) for ref in refs]
        return cls._reach(places, endpoint, capacity, "connect")

    @classmethod
    def _reach(
        cls,
        places: Sequence[tuple[str, str]],
        endpoint: Endpoint,
        capacity: float,
        operation: str,
        *fields: object,
    ) -> "tuple[Channel, ...]":
        """The channels of these names and servers, which are asked at the same time."""
        if not capacity > 0:
            raise InvalidConfig(f"capacity of a consumer must be above 0, not {capacity!r}")
        numbers = [session_of(endpoint).number() for _ in places]
        asked = [
            send(endpoint, server, operation, name, number, 0, *fields, capacity)
            for (name, server), number in zip(places, numbers, strict=True)
        ]
        answers = [
            answered(endpoint, handle, server, operation, name)
            for (name, server), handle in zip(places, asked, strict=True)
        ]
        return tuple(
            cls._reached(endpoint, name, server, number, capacity, answer)
            for (name, server), number, answer in zip(places, numbers, answers, strict=True)
        )

    @classmethod
    def _reached(
        cls,
        endpoint: Endpoint,
        name: str,
        server: str,
        number: int,
        capacity: float,
        answer: Reply,
    ) -> "Channel":
        values, *welcome = answer
        assert isinstance(values, dict)
        config = ChannelConfig.from_dict(values)

        def reunite(bond: Bond) -> None:
            session_of(endpoint).seek(number, Reunion(link, capacity))

        bond = Bond(name, server, tuple(welcome), config.reconnect_s, reunite)  # type: ignore
        link = Link(endpoint, server, name, number, config, bond)
        return cls(link)

    @property
    def ref(self) -> ChannelRef:
        """The channel by name, to send to other workers."""
        return ChannelRef(self._link.channel, self._link.server)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"a Channel belongs to the endpoint of its worker: send channel.ref instead, and call "
            f"ref.open(endpoint) over there ({self!r})"
        )

    def __repr__(self) -> str:
        return f"<Channel {self._link.channel} on {self._link.server} for {self._link.me}>"

    def close(self, timeout: TimeoutLike = DEFAULT) -> None:
        """No more puts by anyone. Consumers get what is in it, then `ChannelClosed`.

        Flushes this producer's own puts first. What other producers' puts have brought to the
        server by then, even if it waits for room, still counts. Closing again does nothing.
        """
        self.flush(timeout)
        self._link.ask("close", timeout=timeout)

    def delete(self, timeout: TimeoutLike = DEFAULT) -> None:
        """Have the server forget a channel that is closed and drained.

        Raises:
            ChannelBusy: It is not.
        """
        self._link.ask("delete", timeout=timeout)

    def qsize(self, timeout: TimeoutLike = DEFAULT) -> int:
        """Items queued on the server: neither on their way to it nor given to a consumer."""
        (size,) = self._link.ask("qsize", timeout=timeout)
        assert isinstance(size, int)
        return size

    def statistics(self, timeout: TimeoutLike = DEFAULT) -> ChannelStatistics:
        """The channel as its server sees it now, and the `hit_rate` of what was put from here."""
        (state,) = self._link.ask("statistics", timeout=timeout)
        assert isinstance(state, ChannelStatistics)
        cache = session_of(self._link.endpoint).caches.get(self._link.number)
        return state if cache is None else replace(state, hit_rate=cache.hit_rate)

    @property
    def durability(self) -> str:
        """What an item survives that the server holds, besides the death of its producer.

        memory: nothing more. process: the death of the server's process. disk: that of its host.
        """
        return self._link.bond.durability

    def dead_letters(self, timeout: TimeoutLike = DEFAULT) -> list[DeadLetter]:
        """The latest items that were given out `max_deliveries` times and never acknowledged,
        oldest first. Looking at them changes nothing; `statistics().dead_items` counts all.
        """
        facts, crates = self._link.ask("dead_letters", timeout=timeout)
        assert isinstance(facts, tuple) and isinstance(crates, tuple)
        letters: list[DeadLetter] = []
        runs = [run for crate in crates for run in shelve(Crate(*crate), self._link.channel)]
        for fact, cargo in zip(facts, chain.from_iterable(map(cargos, runs)), strict=True):
            item, problem = None, ""
            try:
                item = open_cargo(self._link, cargo)
            except (CodecError, ItemsLost) as error:
                problem = str(error)
            weight, key, deliveries, order = fact
            letters.append(DeadLetter(item, weight, key, deliveries, order, problem))
        return letters

    def __iter__(self) -> Iterator[Any]:
        """Items until the channel is closed and drained; acknowledged as by `get`.

        Waits as long as it takes: a channel of a slow producer is not an error. It says in the
        log, every `connection_timeout_s`, that it is still waiting and for what.
        """
        return self._iterate()


def _forget(session: Session, inbox: Inbox, outbox: Outbox, link: Link) -> None:
    """The user's channel object is gone: its consumer ends, on another thread."""

    def end() -> None:
        inbox.farewell()
        if outbox.idle:
            link.bond.part()

    session.before_end(-link.number, None)
    session.soon(end)
