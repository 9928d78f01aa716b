"""What the channel clients of one endpoint share: numbers, recalls, renewals, news of losses."""

import itertools
import logging
import threading
import weakref
from typing import Protocol

from rlinf.comm.endpoint import Endpoint
from rlinf.comm.events import Event, Lost
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
    """One per endpoint, made on first use. Its thread runs only while something is held."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._numbers = itertools.count(1)
        self._keepers: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._holding = threading.Event()
        self._thread: threading.Thread | None = None
        self._name = str(endpoint.id)
        self._changed = threading.Event()
        endpoint.serve(CLIENT_SERVICE, self._serve)
        endpoint.add_sink(self._notice)

    def number(self) -> int:
        """A number for one more client, not used before on this endpoint."""
        return next(self._numbers)

    def add(self, number: int, keeper: Keeper) -> None:
        """Have this keeper hear of recalls and losses, for as long as it lives."""
        with self._lock:
            self._keepers[number] = keeper
        self._changed.set()  # its lease may be shorter than the pause under way

    def hold(self) -> None:
        """Something is held: see that it is renewed."""
        if self._holding.is_set():
            return
        with self._lock:
            self._holding.set()
            if self._thread is None:
                name = f"rlinf-leases-{self._name}"
                self._thread = threading.Thread(target=self._renew, name=name, daemon=True)
                self._thread.start()

    def _living(self) -> list[Keeper]:
        with self._lock:
            return list(self._keepers.values())

    def _renew(self) -> None:
        while True:
            if self._changed.wait(min((k.lease_s for k in self._living()), default=1.0) / 3):
                self._changed.clear()
                continue
            self._holding.clear()
            held = [keeper.renew() for keeper in self._living()]  # each of them, not the first only
            if any(held):
                self._holding.set()
                continue
            with self._lock:
                if not self._holding.is_set():
                    self._thread = None
                    return

    def _serve(self, request: Request) -> None:
        operation, number = request.payload
        keeper = self._keepers.get(number)
        tags = keeper.recalled() if keeper is not None and operation == "recall" else []
        request.reply(tuple(tags))

    def _notice(self, event: Event) -> None:
        if isinstance(event, Lost):
            for keeper in self._living():
                if keeper.server == str(event.peer):
                    keeper.server_lost(event.reason)


_sessions: weakref.WeakKeyDictionary[Endpoint, Session] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def session_of(endpoint: Endpoint) -> Session:
    """The session of an endpoint."""
    with _lock:
        session = _sessions.get(endpoint)
        if session is None:
            session = _sessions[endpoint] = Session(endpoint)
        return session
