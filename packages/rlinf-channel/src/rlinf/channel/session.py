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
from typing import Protocol

from rlinf.channel.errors import ChannelError
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError
from rlinf.comm.events import Closing, Event, Lost
from rlinf.comm.request import Request

log = logging.getLogger(__name__)

CLIENT_SERVICE = "channel-client"


class Keeper(Protocol):
    """Something that holds what must be renewed while it is held."""

    lease_s: float
    server: str

    def renew(self) -> bool:
        """Tell the server that it still holds; whether there is anything held."""
        ...

    def recalled(self) -> list[int]:
        """Give back what has not been begun; its tags."""
        ...

    def server_lost(self, reason: str) -> None:
        """The server is gone: what was held is not held any more."""
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
        self._closed = False
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
            if self._thread is None:
                name = f"rlinf-leases-{self._name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        self._mail.put(_nothing)

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
        operation, number = request.payload
        keeper = self._keepers.get(number)
        tags = keeper.recalled() if keeper is not None and operation == "recall" else []
        request.reply(tuple(tags))

    def _notice(self, event: Event) -> None:
        if isinstance(event, Closing):
            self.closing()
        elif isinstance(event, Lost):
            for keeper in self._living():
                if keeper.server == str(event.peer):
                    keeper.server_lost(event.reason)


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
