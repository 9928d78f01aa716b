"""The producer's side of a channel: numbered items on their way to the server, within a window.

A lone item leaves at once. While messages are on their way, further items are gathered and leave
together, when the next acknowledgement comes or the message is full, whichever is first: no
timer, and no item waits for one that may never come.
"""

import logging
import time
from itertools import chain

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
from rlinf.channel.flight import Flight, Message
from rlinf.channel.link import GRACE_S, Link
from rlinf.channel.loading import Loading
from rlinf.channel.session import Session
from rlinf.channel.spans import Ranges
from rlinf.comm.errors import CommError
from rlinf.comm.handle import Handle, TimeoutLike

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 23
BLOCK_ITEMS = 2048
ON_THE_WAY = 1
"""Messages sent ahead of their acknowledgements before small items are gathered instead."""


class Outbox(Flight):
    """Puts of one channel object. Thread-safe; items keep the order in which they were added.

    Items stay here until they are acknowledged. When the server dies and comes back they are sent
    again, under their numbers, so that none is in twice.
    """

    def __init__(self, link: Link, session: Session) -> None:
        super().__init__(link, session)
        self._next = 0
        self._gathered: Message | None = None
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
        link.bond.numbers = self._numbers

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
            [parcel] = detach([cargo[2]], self._link.endpoint.empty)  # type: ignore[list-item]
            cargo = LARGE, nbytes, parcel
            waits = len(self._on_the_way) >= ON_THE_WAY and 2 * nbytes < BLOCK_BYTES
        with self._lock:
            if self._failed is not None:
                self._check()
            items, held = self._items + 1, self._nbytes + nbytes
            if items <= self._easy_items and held <= self._easy_bytes:
                message = self._gathered
                if message is None:
                    message = self._gathered = Message(self._next, Loading())
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
            oldest: Message | None = None
            with self._lock:
                self._check()
                if self._exceeds_room(items):
                    ready = self._seal()
                    break
                if self._fits_window(items):
                    self.own(items)
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
        self.own(single)
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

    def _numbers(self) -> tuple[int, Ranges]:
        """The next number, and which ones before it may still come."""
        with self._lock:
            runs = [(message.first, message.last) for message in self._on_the_way]
            if self._gathered is not None:
                runs.append((self._gathered.first, self._gathered.last))
            runs += self._commits.items()
            return self._next, tuple(chain.from_iterable(sorted(runs)))

    # Under the lock

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

    def _is_full(self, message: Message) -> bool:
        return (
            len(self._on_the_way) < ON_THE_WAY
            or message.items.count >= BLOCK_ITEMS
            or message.items.nbytes >= BLOCK_BYTES
        )

    def _gather(self, items: Loading) -> Message:
        message = self._gathered
        if message is None:
            message = self._gathered = Message(self._next, Loading())
        message.items.extend(items)
        self._next += items.count
        self._items += items.count
        self._nbytes += items.nbytes
        return message

    def _seal(self) -> list[Message]:
        message, self._gathered = self._gathered, None
        return [] if message is None else [self._launch(message)]

    def _number(self, items: Loading) -> Message:
        message = Message(self._next, items, watched=True)
        self._next += items.count
        self._items += items.count
        self._nbytes += items.nbytes
        return message

    def _launch(self, message: Message) -> Message:
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

    def own(self, items: Loading) -> None:
        """Have the items in memory of our own, if they may have to be sent again."""
        if self._keeps and items.parcels:
            items.parcels = detach(items.parcels, self._link.endpoint.empty)

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

    def _concluded(self, message: Message, error: ChannelError | CommError | None) -> list[Message]:
        self._settle(message.items)
        if error is not None and not (isinstance(error, Full) and message.watched):
            self._fail(error, message)
        return self._seal() if self._failed is None or self._once else []

    def _fail(self, error: ChannelError | CommError, message: Message) -> None:
        """From now on every call says so, and how many items taken over are not held."""
        lost = 0 if message.watched else message.items.count - len(message.handles)
        if isinstance(error, SpoolFull):
            if lost and (self._failed is None or isinstance(self._failed, SpoolFull)):
                lost += getattr(self._failed, "lost", 0)
                self._failed, self._once = SpoolFull(error.channel, error.reason, lost), True
            return
        if isinstance(error, Full):
            if lost and self._failed is None:
                self._failed, self._once = error, True
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
