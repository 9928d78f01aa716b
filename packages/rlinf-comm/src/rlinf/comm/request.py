"""Services: requests, replies, and errors that travel."""

import importlib
import itertools
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from rlinf.comm.address import WorkerId
from rlinf.comm.errors import CommError, RemoteError, ServiceUnknown
from rlinf.comm.frame import ERROR, REPLY
from rlinf.comm.handle import Handle

log = logging.getLogger(__name__)

WORKER_KEY = "worker id"


class Request:
    """What a service handler is given. Answer it once, now or later, from any thread.

    Attributes:
        payload: What the caller sent.
        source: Who called.
        epoch: Which incarnation of it.
        service: The name it was called by.
    """

    __slots__ = ("_answer", "_answered", "_lock", "epoch", "payload", "service", "source")

    def __init__(
        self,
        service: str,
        payload: Any,
        source: tuple[WorkerId, int],
        answer: Callable[[int, object], None],
    ) -> None:
        self.service = service
        self.payload = payload
        self.source, self.epoch = source
        self._answer = answer
        self._answered = False
        self._lock = threading.Lock()

    def reply(self, value: object = None) -> None:
        """Send the result. To a caller that is gone: nothing happens.

        Raises:
            CodecError: The value cannot be encoded; the caller has been told so.
            RuntimeError: The request was answered before.
        """
        self._once()
        try:
            self._answer(REPLY, value)
        except CommError as error:
            self._answer(ERROR, describe(error))
            raise

    def fail(self, error: BaseException) -> None:
        """Send an error: one of ours is raised as itself over there, others as RemoteError."""
        self._once()
        self._answer(ERROR, describe(error))

    def answered(self) -> bool:
        """Whether `reply` or `fail` was called."""
        return self._answered

    def _once(self) -> None:
        with self._lock:
            if self._answered:
                raise RuntimeError(f"a {self.service!r} request of {self.source} answered twice")
            self._answered = True


Handler = Callable[[Request], None]


class Services:
    """Handlers by name."""

    def __init__(self, owner: WorkerId) -> None:
        self._owner = owner
        self._handlers: dict[str, Handler] = {}

    def add(self, service: str, handler: Handler) -> None:
        """Serve under this name; one handler a name."""
        if service in self._handlers:
            raise ValueError(f"{self._owner} serves {service!r} already")
        self._handlers[service] = handler

    def names(self) -> tuple[str, ...]:
        """What is served."""
        return tuple(sorted(self._handlers))

    def handle(self, request: Request) -> None:
        """Run the handler; whatever it raises goes to the caller and into the log."""
        handler = self._handlers.get(request.service)
        if handler is None:
            known = ", ".join(self.names()) or "nothing"
            request.fail(
                ServiceUnknown(
                    f"{self._owner} serves no {request.service!r}; it serves {known}",
                    peer=self._owner,
                    service=request.service,
                )
            )
            return
        try:
            handler(request)
        except Exception as error:
            log.exception("%s: service %r raised", self._owner, request.service)
            if not request.answered():
                request.fail(error)


class Calls:
    """Calls that wait for their reply, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Handle[Any], WorkerId]] = {}

    def add(self, handle: Handle[Any], peer: WorkerId) -> int:
        """Remember a call until its handle is done."""
        number = next(self._numbers)
        self._pending[number] = (handle, peer)
        handle.add_done_callback(lambda _: self._forget(number))
        return number

    def _forget(self, number: int) -> None:
        self._pending.pop(number, None)

    def get(self, number: int) -> Handle[Any] | None:
        """The handle of a call that still waits."""
        found = self._pending.get(number)
        return None if found is None else found[0]

    def of(self, peer: WorkerId | None = None) -> Iterator[Handle[Any]]:
        """The calls that wait for this peer (None: all)."""
        for handle, whom in list(self._pending.values()):
            if peer is None or whom == peer:
                yield handle


def describe(error: BaseException) -> dict[str, object]:
    """An error as plain data."""
    kind = type(error)
    message = error.message if isinstance(error, CommError) else str(error)
    attributes = getattr(error, "attributes", {})
    return {
        "kind": f"{kind.__module__}:{kind.__qualname__}",
        "message": message,
        "attributes": {name: _plain(value) for name, value in dict(attributes).items()},
        "traceback": "".join(traceback.format_exception(error)),
    }


def rebuild(data: object, peer: WorkerId) -> BaseException:
    """The error that `describe` described: its own class if it is one of ours."""
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        return RemoteError(f"{peer} sent an error that makes no sense: {data!r}", peer=peer)
    module, _, name = data["kind"].partition(":")
    message = str(data.get("message"))
    given = data.get("attributes")
    given = given if isinstance(given, dict) else {}
    attributes = {key: _rich(value) for key, value in given.items()}
    if module.split(".")[0] == "rlinf":
        try:
            kind = getattr(importlib.import_module(module), name)
            if isinstance(kind, type) and issubclass(kind, Exception):
                error = kind(message, **attributes)
                error.add_note(f"raised by {peer}")
                return error
        except (ImportError, AttributeError, TypeError, ValueError):
            log.warning("%s raised %s, which this side cannot rebuild", peer, data["kind"])
    error = RemoteError(
        f"{peer} raised {name}: {message}",
        peer=peer,
        kind=data["kind"],
        traceback=str(data.get("traceback", "")),
    )
    error.add_note(f"traceback on {peer}:\n{error.traceback}")
    return error


def _plain(value: object) -> object:
    if isinstance(value, WorkerId):
        return {WORKER_KEY: str(value)}
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    return str(value)


def _rich(value: object) -> object:
    if isinstance(value, dict) and isinstance(value.get(WORKER_KEY), str):
        return WorkerId.parse(value[WORKER_KEY])
    return value
