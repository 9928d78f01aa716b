"""What the channel clients of one endpoint share: numbers, recalls, renewals, news of losses."""

import atexit
import contextlib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from rlinf.channel.cache import DeviceCache, Memory
from rlinf.channel.errors import ChannelError
from rlinf.channel.spans import Ranges
from rlinf.channel.torch_memory import TorchMemory
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError, EndpointClosed
from rlinf.comm.events import Closing, Event, Lost
from rlinf.comm.request import Request

log = logging.getLogger(__name__)

CLIENT_SERVICE = "channel-client"

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
"""Between two looks for a server that died; each is twice as long as the one before."""


class Keeper(Protocol):
    """Something that holds what must be renewed while it is held."""

    lease_s: float
    server: str

    def renew(self) -> bool:
        """Tell the server that it still holds; whether there is anything held."""
        ...

    def recalled(self) -> Ranges:
        """Give back what has not been begun; its tags."""
        ...

    def server_lost(self, lost: Lost) -> None:
        """An incarnation of the server is gone: closed (`clean`), or dead."""
        ...


class Session:
    """One per endpoint, made on first use.

    Its thread renews leases; it sleeps without a deadline while nothing is held.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._numbers = itertools.count(1)
        self._keepers: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()
        self._closers: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._holding = False
        self._thread: threading.Thread | None = None
        self._name = str(endpoint.id)
        self._epoch = endpoint.epoch
        self._closed = False
        self._seekers: dict[int, Callable[[], bool]] = {}
        self._seeking: threading.Thread | None = None
        self._ended = threading.Event()
        self.staying: dict[int, Callable[[int], None]] = {}
        """What stays on devices, by the number of its lock: how it is told to leave them, as far
        as it is since the end of a given grant that it stays."""
        self.memory: Memory = TorchMemory()
        self.caches: dict[int, DeviceCache] = {}
        """Items that stay on a device, by the number of the channel object that put them."""
        endpoint.serve(CLIENT_SERVICE, self._serve)
        endpoint.add_sink(self._notice)

    def number(self) -> int:
        """A number for one more client, not used before on this endpoint."""
        return next(self._numbers)

    def add(self, number: int, keeper: Keeper) -> None:
        """Have this keeper hear of recalls and losses, for as long as it lives."""
        with self._lock:
            self._keepers[number] = keeper
        if self._thread is not None:
            self._mail.put(_nothing)  # its lease may be shorter than the pause under way

    def hold(self) -> None:
        """Something is held, or waited for: see that it is renewed."""
        if self._holding:
            return
        with self._lock:
            self._holding = True
        self.start()
        self._mail.put(_nothing)

    def start(self) -> None:
        """See that the thread runs."""
        with self._lock:
            if self._thread is None:
                name = f"rlinf-leases-{self._name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def seek(self, number: int, seeker: Callable[[], bool]) -> None:
        """Call `seeker`, which may wait a little, on a thread until it returns True."""
        with self._lock:
            self._seekers[number] = seeker
            if self._seeking is None:
                name = f"rlinf-reunion-{self._name}"
                self._seeking = threading.Thread(target=self._seek, name=name, daemon=True)
                self._seeking.start()

    def soon(self, action: Callable[[], None]) -> None:
        """Run `action` on the session's thread; safe to call from a finalizer.

        Not where nothing was ever held, or after the end: there is nothing to give back then, and
        an action that nobody runs would keep the endpoint alive.
        """
        if self._thread is not None and not self._closed:
            self._mail.put(action)

    def before_end(self, number: int, action: Callable[[], None] | None) -> None:
        """Run `action` before the endpoint closes or the program ends; None: not any more."""
        if action is None:
            self._closers.pop(number, None)
        else:
            self._closers[number] = action

    def closing(self) -> None:
        """Leave nothing behind that was taken over and is not sent yet."""
        if self._closed:
            return
        self._closed = True
        for action in list(self._closers.values()):
            try:
                action()
            except (ChannelError, CommError) as error:
                log.warning("at the end of %s: %s", self._name, error)
        self._closers.clear()
        self._mail.put(_nothing)
        self._ended.set()

    def _seek(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._ended.wait(pause_s):
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            for number, seeker in list(self._seekers.items()):
                try:
                    found = seeker()
                except (ChannelError, CommError) as error:
                    log.warning("looking for a lost server: %s", error)
                    found = isinstance(error, EndpointClosed)
                if found:
                    with self._lock:
                        if self._seekers.get(number) is seeker:
                            del self._seekers[number]
            with self._lock:
                if not self._seekers:
                    self._seeking = None
                    return

    def _living(self) -> list[Keeper]:
        with self._lock:
            return list(self._keepers.values())

    def _run(self) -> None:
        renewed_at = time.monotonic()
        while not self._closed:
            pause_s = None
            if self._holding:
                lease_s = min((keeper.lease_s for keeper in self._living()), default=1.0)
                pause_s = max(0.0, renewed_at + lease_s / 3 - time.monotonic())
            try:
                self._mail.get(timeout=pause_s)()
            except queue.Empty:
                renewed_at = time.monotonic()
                self._holding = False
                held = [keeper.renew() for keeper in self._living()]
                self._holding |= any(held)
        with contextlib.suppress(queue.Empty):
            while True:
                self._mail.get_nowait()

    def _serve(self, request: Request) -> None:
        operation, number, *fields = request.payload
        if operation in ("left", "redeem"):
            self._claimed(request, operation, number, *fields)
            return
        if operation == "leave":
            self._leave(request, number, *fields)
            return
        keeper = self._keepers.get(number)
        tags = keeper.recalled() if keeper is not None and operation == "recall" else ()
        request.reply(tags)

    def _leave(self, request: Request, number: int, token: Any) -> None:
        """On a thread of its own: neither messages nor renewals wait for an engine."""
        tell = self.staying.get(number)

        def leave() -> None:
            if tell is not None:
                tell(token)
            request.reply(None)

        name = f"rlinf-leaves-{self._name}"
        threading.Thread(target=leave, name=name, daemon=True).start()

    def _claimed(
        self, request: Request, operation: str, number: int, epoch: int, items: Any
    ) -> None:
        """Items of a cache have left their channel, or one is needed elsewhere."""
        cache = self.caches.get(number) if epoch == self._epoch else None
        if operation == "left":
            request.reply(None)
            if cache is not None:
                cache.done(items)
        elif cache is None:
            request.fail(KeyError(f"{self._name} has no such item"))
        else:
            self.soon(lambda: _redeem(request, cache, items))

    def _notice(self, event: Event) -> None:
        if isinstance(event, Closing):
            self.closing()
        elif isinstance(event, Lost):
            for keeper in self._living():
                if keeper.server == str(event.peer):
                    keeper.server_lost(event)


def _redeem(request: Request, cache: DeviceCache, item: int) -> None:
    try:
        value = cache.take(item)
    except KeyError as error:
        request.fail(error)
    else:
        request.reply(value)


def _nothing() -> None:
    """Wakes the session's thread."""


_sessions: weakref.WeakKeyDictionary[Endpoint, Session] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def session_of(endpoint: Endpoint) -> Session:
    """The session of an endpoint."""
    with _lock:
        session = _sessions.get(endpoint)
        if session is None:
            if not _sessions:
                atexit.unregister(_at_exit)
                atexit.register(_at_exit)
            session = _sessions[endpoint] = Session(endpoint)
        return session


def _at_exit() -> None:
    with _lock:
        living = list(_sessions.values())
    for session in living:
        session.closing()
