"""The producer's side of a channel: numbered items on their way to the server, within a window.

A lone item leaves at once. While messages are on their way, further items are gathered and leave
together, when the next acknowledgement comes or the message is full, whichever is first: no
timer, and no item waits for one that may never come.
"""

import logging
import threading
import time
from collections import deque
from itertools import chain

from rlinf.channel.batching import Loading
from rlinf.channel.cargo import LARGE, Cargo, detach
from rlinf.channel.errors import (
    ChannelClosed,
    ChannelError,
    Full,
    ItemTooLarge,
    ServerLost,
    SpoolFull,
    Timeout,
)
from rlinf.channel.link import GRACE_S, Link, Reply, ServerAway
from rlinf.channel.session import Session
from rlinf.channel.tags import Ranges
from rlinf.comm.errors import CommError
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.comm.handle import Handle, TimeoutLike

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 22
BLOCK_ITEMS = 256
ON_THE_WAY = 1
"""Messages sent ahead of their acknowledgements before small items are gathered instead."""


class _Message:
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


class Outbox:
    """Puts of one channel object. Thread-safe; items keep the order in which they were added.

    Items stay here until they are acknowledged. When the server dies and comes back they are sent
    again, under their numbers, so that none is in twice.
    """

    def __init__(self, link: Link, session: Session) -> None:
        self._link = link
        self._session = session
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        """A message was sent, sent again or settled; only told while somebody waits for it."""
        self._listeners = 0
        self._commits: dict[int, int] = {}
        """First and last number of each commit under way."""
        self._accepted = 0
        """The number after the last one which the server has accepted."""
        self._next = 0
        self._gathered: _Message | None = None
        self._on_the_way: deque[_Message] = deque()
        self._items = 0
        """Taken over and not acknowledged, gathered ones included."""
        self._nbytes = 0
        self._window_items = link.config.put_window_items
        self._window_bytes = link.config.window_bytes
        self._bound_bytes = link.config.buffer_bytes
        self._keeps = link.config.reconnect_s > 0
        self._room_items: float = 0.0
        self._room_bytes = 0
        """What the channel itself had room for, as of the last acknowledgement."""
        self._set_room(link.config.max_items, self._bound_bytes)
        self._failed: ChannelError | CommError | None = None
        self._once = False
        """`_failed` is told once, and then it goes on."""
        link.bond.numbers = self._numbers
        link.bond.accepted = lambda: self._accepted

    def add(self, cargo: Cargo, weight: float, key: str | None, timeout: TimeoutLike) -> None:
        """Take one item over; returns when the window had room for it.

        Where the channel's own bound is what is short, this waits until the server holds it.

        Raises:
            Full: No room by the deadline; the item will not be in the channel.
            ItemTooLarge: It never can be.
            ChannelClosed, ServerLost: Of this item or, noticed only now, of earlier ones.
        """
        nbytes = cargo[1]
        waits = cargo[0] != LARGE
        if not waits and self._keeps:  # it may have to be sent again, when the original has changed
            cargo = detach(cargo, self._link.endpoint.empty)
            waits = len(self._on_the_way) >= ON_THE_WAY and 2 * nbytes < BLOCK_BYTES
        with self._lock:
            if self._failed is not None:
                self._check()
            items, held = self._items + 1, self._nbytes + nbytes
            if items <= self._easy_items and held <= self._easy_bytes:
                message = self._gathered
                if message is None:
                    message = self._gathered = _Message(self._next, Loading())
                message.items.add(cargo, weight, key)
                self._next += 1
                self._items, self._nbytes = items, held
                if waits and not self._is_full(message):
                    return
                self._seal()
            else:
                message = None
        if message is not None:
            self._send(message)
            return
        single = Loading()
        single.add(cargo, weight, key)
        self.add_all(single, self._link.deadline(timeout))

    def add_all(self, items: Loading, deadline: float | None) -> None:
        """Take items over, in one message; otherwise like `add`.

        Raises:
            Full: Its `accepted` says how many are in the channel; the others will not be.
        """
        self._check_size(items)
        while True:
            oldest: _Message | None = None
            with self._lock:
                self._check()
                if self._exceeds_room(items):
                    ready = self._seal()
                    break
                if self._fits_window(items):
                    self._own(items)
                    message = self._gather(items)
                    ready = self._seal() if items.parcels or self._is_full(message) else []
                else:
                    ready = self._seal()
                    oldest = self._on_the_way[0]
            for message in ready:
                self._send(message)
            if oldest is None:
                return
            self._await(oldest, deadline)
        for message in ready:
            self._send(message)
        self._deliver(items, deadline)

    def add_async(self, cargo: Cargo, weight: float, key: str | None) -> Handle[None]:
        """Take an item over; the handle is done when the server holds it. Never waits."""
        what = f"put to channel {self._link.channel}"
        handle: Handle[None] = Handle(what, progress=_Drive(self))
        single = Loading()
        single.add(cargo, weight, key)
        self._check_size(single)
        self._own(single)
        with self._lock:
            self._check()
            message = self._gather(single)
            message.handles.append(handle)
            ready = self._seal() if single.parcels or self._is_full(message) else []
        for sealed in ready:
            self._send(sealed)
        return handle

    def reserve(self, count: int) -> int:
        """Numbers for items that travel in a commit; what was added before leaves before."""
        with self._lock:
            self._check()
            ready = self._seal()
            first = self._next
            self._next += count
            self._commits[first] = self._next - 1
        for message in ready:
            self._send(message)
        return first

    def reserved(self, first: int, *, accepted: bool) -> None:
        """The commit whose numbers begin here has its answer, or none is waited for any more."""
        with self._lock:
            last = self._commits.pop(first)
            if accepted:
                self._accepted = max(self._accepted, last + 1)

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

    @property
    def idle(self) -> bool:
        """Whether nothing is gathered or on its way."""
        return not self._items

    # What the bond tells

    def server_away(self) -> None:
        """What is on the way has to be sent again."""
        with self._lock:
            for message in self._on_the_way:
                message.sent_to = 0

    def server_back(self, news: ChannelError | None) -> None:
        """Send again what is on the way, in order."""
        with self._lock:
            if news is not None and self._failed is None:
                self._failed, self._once = news, True
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

    def _numbers(self) -> tuple[int, Ranges]:
        """The next number, and which ones before it may still come."""
        with self._lock:
            runs = [(message.first, message.last) for message in self._on_the_way]
            if self._gathered is not None:
                runs.append((self._gathered.first, self._gathered.last))
            runs += self._commits.items()
            return self._next, tuple(chain.from_iterable(sorted(runs)))

    # Under the lock

    def _check(self) -> None:
        error = self._failed
        if error is not None:
            if self._once:
                self._failed, self._once = None, False
            raise error

    def _set_room(self, items: int | None, nbytes: int) -> None:
        self._room_items = float("inf") if items is None else items
        self._room_bytes = nbytes
        self._easy_items = min(self._window_items, self._room_items)
        self._easy_bytes = min(self._window_bytes, nbytes)

    def _exceeds_room(self, items: Loading) -> bool:
        return (
            not self._window_items
            or self._items + items.count > self._room_items
            or self._nbytes + items.nbytes > self._room_bytes
        )

    def _fits_window(self, items: Loading) -> bool:
        return not self._items or (
            self._items + items.count <= self._window_items
            and self._nbytes + items.nbytes <= self._window_bytes
        )

    def _is_full(self, message: _Message) -> bool:
        return (
            len(self._on_the_way) < ON_THE_WAY
            or message.items.count >= BLOCK_ITEMS
            or message.items.nbytes >= BLOCK_BYTES
        )

    def _gather(self, items: Loading) -> _Message:
        message = self._gathered
        if message is None:
            message = self._gathered = _Message(self._next, Loading())
        message.items.extend(items)
        self._next += items.count
        self._items += items.count
        self._nbytes += items.nbytes
        return message

    def _seal(self) -> list[_Message]:
        message, self._gathered = self._gathered, None
        return [] if message is None else [self._launch(message)]

    def _number(self, items: Loading) -> _Message:
        message = _Message(self._next, items, watched=True)
        self._next += items.count
        self._items += items.count
        self._nbytes += items.nbytes
        return message

    def _launch(self, message: _Message) -> _Message:
        if not self._on_the_way:
            self._session.before_end(self._link.number, self._end)
        self._on_the_way.append(message)
        return message

    def _settle(self, items: Loading) -> None:
        self._items -= items.count
        self._nbytes -= items.nbytes

    # Without the lock

    def _end(self) -> None:
        self.flush(time.monotonic() + self._link.endpoint.config.linger_s)

    def _own(self, items: Loading) -> None:
        """Have the items in memory of our own, if they may have to be sent again."""
        if self._keeps:
            empty = self._link.endpoint.empty
            items.parcels = [
                detach((LARGE, parcel.nbytes, parcel), empty)[2]  # type: ignore[misc]
                for parcel in items.parcels
            ]

    def _check_size(self, items: Loading) -> None:
        if items.nbytes > self._bound_bytes and items.count == 1:
            raise ItemTooLarge(self._link.channel, items.nbytes, self._bound_bytes)

    def _deliver(self, items: Loading, deadline: float | None) -> None:
        """Send items as one message and wait until the server holds all of them."""
        with self._lock:
            self._check()
            ready = self._seal()
            message = self._launch(self._number(items))
            message.limit = deadline
        for earlier in ready:
            self._send(earlier)
        self._send(message)
        late = None if deadline is None else deadline + GRACE_S
        while not message.settled:
            try:
                self._await(message, late if self._link.bond.up else deadline)
            except Full as error:
                limit = self._link.remaining(deadline) or 0.0
                state = f"{self._link.server} is silent"
                raise Timeout(self._link.channel, "put", limit, state) from error
        if message.error is not None:
            raise message.error

    def _send(self, message: _Message) -> None:
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

    def _answered(self, message: _Message, done: Handle[Reply]) -> None:
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

    def _conclude(self, message: _Message, error: ChannelError | CommError | None) -> None:
        with self._lock:
            if message.settled:
                return
            message.settled, message.error = True, error
            self._settle(message.items)
            self._on_the_way.remove(message)
            if error is not None and not isinstance(error, Full):
                self._fail(error, message)
            ready = self._seal() if self._failed is None or self._once else []
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

    def _fail(self, error: ChannelError | CommError, message: _Message) -> None:
        """From now on every call says so, and how many items taken over are not held."""
        lost = 0 if message.watched else message.items.count - len(message.handles)
        if isinstance(error, SpoolFull):
            if lost and (self._failed is None or isinstance(self._failed, SpoolFull)):
                lost += getattr(self._failed, "lost", 0)
                self._failed, self._once = SpoolFull(error.channel, error.reason, lost), True
            return
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            lost += gathered.items.count - len(gathered.handles)
            message.handles += gathered.handles
            self._settle(gathered.items)
        if isinstance(error, ChannelClosed):
            before = self._failed.lost if isinstance(self._failed, ChannelClosed) else 0
            self._failed = ChannelClosed(self._link.channel, "put", before + lost)
        elif self._failed is None:
            self._failed = error
        if lost:
            log.warning("channel %s: %d item(s) not accepted: %s", self._link.channel, lost, error)

    def _await(self, message: _Message, deadline: float | None) -> None:
        """Wait until a message is acknowledged (its error is noticed by the next `_check`), or has
        to be sent again.
        """
        reply = message.reply
        if reply is not None:
            try:
                reply.wait(self._link.remaining(deadline))
            except CommTimeout as error:
                state = f"{self._items} item(s) of this producer are not acknowledged yet"
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
            except (Full, ServerLost):
                return


class _Drive:
    """Lets whoever waits for an acknowledgement read the sockets meanwhile."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def drive(self, handle: Handle[None], deadline: float | None) -> None:
        self._outbox.drive(handle, deadline)
