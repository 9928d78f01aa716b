"""Messages of a producer on their way to the server, over the deaths of the server.

A message stays here until it is acknowledged. When the server dies and comes back it is sent again,
under the same numbers, so that none of its items is in twice.
"""

import threading
from collections import deque

from rlinf.channel.errors import ChannelError, Full, ServerLost
from rlinf.channel.link import Link, Reply, ServerAway
from rlinf.channel.loading import Loading
from rlinf.channel.session import Session
from rlinf.comm.errors import CommError
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.comm.handle import Handle


class Message:
    """Items which travel together, first gathered, then sent, then acknowledged."""

    __slots__ = (
        "error",
        "first",
        "handles",
        "items",
        "limit",
        "reply",
        "sent_to",
        "settled",
        "watched",
    )

    def __init__(self, first: int, items: Loading, *, watched: bool = False) -> None:
        self.first = first
        self.items = items
        self.watched = watched
        """Its caller waits for the reply and is told by it."""
        self.handles: list[Handle[None]] = []
        self.reply: Handle[Reply] | None = None
        """None: not sent yet, or to be sent to the next incarnation of the server."""
        self.sent_to = 0
        """Which incarnation."""
        self.limit: float | None = None
        """When the server is to refuse what has no room by then."""
        self.settled = False
        self.error: ChannelError | CommError | None = None
        """How it was settled."""

    @property
    def last(self) -> int:
        """The number of the last item."""
        return self.first + self.items.count - 1


class Flight:
    """The half of an `Outbox` that sends, waits and sends again. Thread-safe."""

    def __init__(self, link: Link, session: Session) -> None:
        self._link = link
        self._session = session
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        """A message was sent, sent again or settled; only told while somebody waits for it."""
        self._listeners = 0
        self._on_the_way: deque[Message] = deque()
        self._commits: dict[int, int] = {}
        """First and last number of each commit under way."""
        self._accepted = 0
        """The number after the last one which the server has accepted."""
        self._failed: ChannelError | CommError | None = None
        self._once = False
        """`_failed` is told once, and then it goes on."""
        link.bond.accepted = lambda: self._accepted

    # What the outbox does, under the lock

    def _set_room(self, items: int | None, nbytes: int) -> None:
        """The channel has so much room."""
        raise NotImplementedError

    def _concluded(self, message: Message, error: ChannelError | CommError | None) -> list[Message]:
        """A message has its answer; what to send next."""
        raise NotImplementedError

    def reserved(self, first: int, *, accepted: bool) -> None:
        """The commit whose numbers begin here has its answer, or none is waited for any more."""
        with self._lock:
            last = self._commits.pop(first)
            if accepted:
                self._accepted = max(self._accepted, last + 1)

    # What the bond tells

    def server_away(self) -> None:
        """What is on the way has to be sent again."""
        with self._lock:
            for message in self._on_the_way:
                message.sent_to = 0

    def tell(self, news: ChannelError) -> None:
        """The next call raises this."""
        with self._lock:
            if self._failed is None:
                self._failed, self._once = news, True

    def server_back(self) -> None:
        """Send again what is on the way, in order."""
        with self._lock:
            waiting = list(self._on_the_way)
        for message in waiting:
            self._send(message)

    def server_gone(self, error: ServerLost) -> None:
        """Nothing of this outbox will be acknowledged any more."""
        with self._lock:
            if self._failed is None or self._once:
                self._failed, self._once = error, False
            stranded = [message for message in self._on_the_way if message.reply is None]
        for message in stranded:
            self._conclude(message, error)
        with self._news:
            self._news.notify_all()

    # Under the lock

    def _check(self) -> None:
        error = self._failed
        if error is not None:
            if self._once:
                self._failed, self._once = None, False
            raise error

    # Without the lock

    def _send(self, message: Message) -> None:
        """Send a message to the server there is, if it was not sent to it already."""
        bond = self._link.bond
        with self._lock:
            incarnation = bond.incarnation
            if message.settled or message.sent_to == incarnation or not bond.up:
                return
            message.sent_to = incarnation
        wire = tuple(message.items.crate())
        limit = self._link.remaining(message.limit)
        reply = self._link.call_of(incarnation, "put", message.first, wire, limit)
        with self._lock:
            message.reply = reply
            self._tell()
        reply.add_done_callback(lambda done: self._answered(message, done))

    def _tell(self) -> None:
        if self._listeners:
            self._news.notify_all()

    def _answered(self, message: Message, done: Handle[Reply]) -> None:
        """An acknowledgement has come, or will not: on the thread that completes the reply."""
        error: ChannelError | CommError | None = None
        try:
            items, nbytes, held = self._link.read(done, "put")
            with self._lock:
                self._set_room(items, nbytes)  # type: ignore[arg-type]
                self._accepted = max(self._accepted, message.last + 1)
            self._link.bond.held = held  # type: ignore[assignment]
        except ServerAway:
            with self._lock:
                message.reply = None
                self._tell()
            self._send(message)  # if another one is there already
            return
        except (ChannelError, CommError) as problem:
            error = problem
        self._conclude(message, error)

    def _conclude(self, message: Message, error: ChannelError | CommError | None) -> None:
        with self._lock:
            if message.settled:
                return
            message.settled, message.error = True, error
            self._on_the_way.remove(message)
            ready = self._concluded(message, error)
            if not self._on_the_way:
                self._session.before_end(self._link.number, None)
            self._tell()
        for handle in message.handles:
            if error is None:
                handle.set_result(None)
            else:
                handle.set_error(error)
        for following in ready:
            self._send(following)

    def _await(self, message: Message, deadline: float | None) -> None:
        """Wait until a message is acknowledged (its error is noticed by the next `_check`), or has
        to be sent again.
        """
        reply = message.reply
        if reply is not None:
            try:
                reply.wait(self._link.remaining(deadline))
            except CommTimeout as error:
                items = sum(message.items.count for message in list(self._on_the_way))
                state = f"{items} item(s) of this producer are not acknowledged yet"
                raise Full(self._link.channel, state) from error

        def changed() -> bool:
            lost = self._link.bond.gone_for_good
            return message.settled or message.reply is not reply or (reply is None and lost)

        with self._news:  # another thread is just sending or settling it, or the server is away
            self._listeners += 1
            in_time = self._news.wait_for(changed, self._link.remaining(deadline))
            self._listeners -= 1
        if not in_time:
            raise self._link.bond.error("put")
