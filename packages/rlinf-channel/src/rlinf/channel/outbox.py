"""The producer's side of a channel: numbered items on their way to the server, within a window.

A lone item leaves at once. While messages are on their way, further small items are gathered and
leave together, when the next acknowledgement comes or the gathered block is full, whichever is
first: no timer, and no item waits for one that may never come.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from rlinf.channel.batching import Cargo, crate
from rlinf.channel.errors import ChannelClosed, ChannelError, Full, ServerLost
from rlinf.channel.link import GRACE_S, Link, Reply
from rlinf.channel.session import Session
from rlinf.comm.errors import CommError
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.comm.handle import Handle

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 16
BLOCK_ITEMS = 256
ON_THE_WAY = 4
"""Messages sent ahead of their acknowledgements before small items are gathered instead."""

Loaded = tuple[Cargo, float, str | None]


class _Message:
    """Items which travel together, first gathered, then sent, then acknowledged."""

    __slots__ = ("first", "handles", "items", "nbytes", "reply", "watched")

    def __init__(self, first: int, *, watched: bool = False) -> None:
        self.first = first
        self.watched = watched
        """Its caller waits for the reply and is told by it."""
        self.items: list[Loaded] = []
        self.nbytes = 0
        self.handles: list[Handle[None]] = []
        self.reply: Handle[Reply] | None = None


class Outbox:
    """Puts of one channel object. Thread-safe; items keep the order in which they were added."""

    def __init__(self, link: Link, session: Session) -> None:
        self._link = link
        self._session = session
        self._window_items = link.config.put_window_items
        self._window_bytes = link.config.window_bytes
        self._lock = threading.Lock()
        self._sent = threading.Condition(self._lock)
        self._unsent_awaited = 0
        self._next = 0
        self._gathered: _Message | None = None
        self._on_the_way: deque[_Message] = deque()
        self._items = 0
        self._nbytes = 0
        self._room_items = link.config.max_items
        self._room_bytes = link.config.buffer_bytes
        self._failed: ChannelError | CommError | None = None

    def add(self, items: Sequence[Loaded], deadline: float | None, *, gather: bool) -> None:
        """Take items over; returns when the window had room for them.

        With `gather` they may wait for others to leave with them, while messages are on their
        way. Where the channel's own bound is what is short, this waits until the server holds
        the items.

        Raises:
            Full: No room by the deadline; what `accepted` does not count will not be in the
                channel.
            ChannelClosed, ServerLost: Of these items or, noticed only now, of earlier ones.
        """
        nbytes = sum([item[0].nbytes for item in items])
        while True:
            oldest: _Message | None = None
            with self._lock:
                self._check()
                if self._exceeds_room(len(items), nbytes):
                    break
                if self._fits_window(len(items), nbytes):
                    ready = self._gather(items, nbytes)
                    if not gather:
                        ready += self._seal()
                else:
                    ready = self._seal()
                    oldest = self._on_the_way[0]
            for message in ready:
                self._send(message)
            if oldest is None:
                return
            self._await(oldest, deadline)
        self._deliver(items, deadline)

    def add_async(self, item: Loaded, what: str) -> Handle[None]:
        """Take an item over; the handle is done when the server holds it. Never waits."""
        handle: Handle[None] = Handle(what, progress=_Drive(self))
        with self._lock:
            self._check()
            ready = self._gather([item], item[0].nbytes, handle)
        for message in ready:
            self._send(message)
        return handle

    def reserve(self, count: int) -> int:
        """Numbers for items that travel in a commit; what was added before leaves before."""
        with self._lock:
            self._check()
            ready = self._seal()
            first = self._next
            self._next += count
        for message in ready:
            self._send(message)
        return first

    def flush(self, deadline: float | None) -> None:
        """Wait until the server holds everything that was added.

        Raises:
            Full: It did not by the deadline; the items stay on their way.
            ChannelClosed, ServerLost: Some will never be held.
        """
        while True:
            with self._lock:
                self._check()
                ready = self._seal()
                oldest = self._on_the_way[0] if self._on_the_way else None
            for message in ready:
                self._send(message)
            if oldest is None:
                return
            self._await(oldest, deadline)

    def _end(self) -> None:
        self.flush(time.monotonic() + self._link.endpoint.config.linger_s)

    def server_lost(self, reason: str) -> None:
        """Nothing of this outbox will be acknowledged any more."""
        link = self._link
        with self._lock:
            self._failed = self._failed or ServerLost(link.channel, link.server, "put", reason)

    @property
    def unacknowledged(self) -> int:
        """Items taken over which the server has not said it holds."""
        return self._items

    # Under the lock

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _exceeds_room(self, count: int, nbytes: int) -> bool:
        short = self._room_items is not None and self._items + count > self._room_items
        return not self._window_items or short or self._nbytes + nbytes > self._room_bytes

    def _fits_window(self, count: int, nbytes: int) -> bool:
        return not self._items or (
            self._items + count <= self._window_items
            and self._nbytes + nbytes <= self._window_bytes
        )

    def _gather(
        self, items: Sequence[Loaded], nbytes: int, handle: Handle[None] | None = None
    ) -> list[_Message]:
        message = self._gathered
        if message is None:
            message = self._gathered = _Message(self._next)
        message.items += items
        if handle is not None:
            message.handles.append(handle)
        message.nbytes += nbytes
        self._next += len(items)
        self._items += len(items)
        self._nbytes += nbytes
        full = message.nbytes >= BLOCK_BYTES or len(message.items) >= BLOCK_ITEMS
        return self._seal() if full or len(self._on_the_way) < ON_THE_WAY else []

    def _seal(self) -> list[_Message]:
        message, self._gathered = self._gathered, None
        if message is None:
            return []
        self._launch(message)
        return [message]

    def _number(self, items: Sequence[Loaded]) -> _Message:
        message = _Message(self._next, watched=True)
        message.items = list(items)
        message.nbytes = sum(item[0].nbytes for item in items)
        self._next += len(items)
        self._items += len(items)
        self._nbytes += message.nbytes
        return message

    def _launch(self, message: _Message) -> None:
        if not self._on_the_way:
            self._session.before_end(self._link.number, self._end)
        self._on_the_way.append(message)

    # Without the lock

    def _deliver(self, items: Sequence[Loaded], deadline: float | None) -> None:
        """Send items as one message and wait until the server holds all of them."""
        with self._lock:
            self._check()
            ready = self._seal()
            message = self._number(items)
            self._launch(message)
        for earlier in ready:
            self._send(earlier)
        limit = self._link.remaining(deadline)
        self._send(message, limit)
        assert message.reply is not None
        self._link.result(message.reply, "put", None if limit is None else limit + GRACE_S)

    def _send(self, message: _Message, timeout_s: float | None = None) -> None:
        reply = self._link.call("put", message.first, tuple(crate(message.items)), timeout_s)
        with self._lock:
            message.reply = reply
            if self._unsent_awaited:
                self._sent.notify_all()
        reply.add_done_callback(lambda done: self._answered(message, done))

    def _answered(self, message: _Message, done: Handle[Reply]) -> None:
        """An acknowledgement has come, or will not: on the thread that completes the reply."""
        error: ChannelError | CommError | None = None
        try:
            room = self._link.read(done, "put")
        except (ChannelError, CommError) as problem:
            error = problem
        with self._lock:
            self._items -= len(message.items)
            self._nbytes -= message.nbytes
            self._on_the_way.remove(message)
            if error is None:
                self._room_items, self._room_bytes = room  # type: ignore[assignment]
            elif not isinstance(error, Full):
                self._fail(error, message)
            ready = self._seal() if self._failed is None else []
            if not self._on_the_way:
                self._session.before_end(self._link.number, None)
        for handle in message.handles:
            _complete(handle, error)
        for following in ready:
            self._send(following)

    def _fail(self, error: ChannelError | CommError, message: _Message) -> None:
        """From now on every call says so, and how many items taken over are not held."""
        lost = 0 if message.watched else len(message.items) - len(message.handles)
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            lost += len(gathered.items) - len(gathered.handles)
            message.handles += gathered.handles
            self._items -= len(gathered.items)
            self._nbytes -= gathered.nbytes
        if isinstance(error, ChannelClosed):
            before = self._failed.lost if isinstance(self._failed, ChannelClosed) else 0
            self._failed = ChannelClosed(self._link.channel, "put", before + lost)
        elif self._failed is None:
            self._failed = error
        if lost:
            log.warning("channel %s: %d item(s) not accepted: %s", self._link.channel, lost, error)

    def _await(self, message: _Message, deadline: float | None) -> None:
        """Wait until one message is acknowledged (its error is noticed by the next `_check`)."""
        if message.reply is None:  # another thread is just sending it
            with self._sent:
                self._unsent_awaited += 1
                self._sent.wait_for(lambda: message.reply is not None)
                self._unsent_awaited -= 1
        assert message.reply is not None
        try:
            message.reply.wait(self._link.remaining(deadline))
        except CommTimeout as error:
            state = f"{self._items} item(s) of this producer are not acknowledged yet"
            raise Full(self._link.channel, state) from error

    def drive(self, handle: Handle[None], deadline: float | None) -> None:
        """Make progress until one of the handles given out is done or the deadline has come."""
        while not handle.done() and (deadline is None or time.monotonic() < deadline):
            with self._lock:
                ready = self._seal()
                oldest = self._on_the_way[0] if self._on_the_way else None
            for message in ready:
                self._send(message)
            if oldest is None:
                return
            try:
                self._await(oldest, deadline)
            except Full:
                return


class _Drive:
    """Lets whoever waits for an acknowledgement read the sockets meanwhile."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def drive(self, handle: Handle[None], deadline: float | None) -> None:
        self._outbox.drive(handle, deadline)


def _complete(handle: Handle[None], error: BaseException | None) -> None:
    if error is None:
        handle.set_result(None)
    else:
        handle.set_error(error)
