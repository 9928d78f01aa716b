"""The error tree of rlinf.comm.

    CommError
    +-- ConfigError                a setting is unknown or makes no sense
    +-- Timeout                    (also TimeoutError) a deadline passed
    |   +-- ConnectTimeout         no connection to the peer within the deadline
    +-- Cancelled                  the handle was cancelled by its holder
    +-- PeerLost                   (also ConnectionError) the peer died or left meanwhile
    +-- StaleEpoch                 (also ConnectionError) meant for an earlier incarnation
    +-- UnknownWorker              (also LookupError) nobody is registered under this name
    +-- AuthenticationError        the peer does not hold the registry's token
    +-- ProtocolError              the peer speaks another version, or sent what makes no sense
    +-- NoTransport                nothing on this host can reach the peer
    +-- ServiceUnknown             (also LookupError) the peer serves no such service
    +-- CodecError                 (also ValueError) an object or message that cannot be (de)coded
    +-- MessageMismatch            (also ValueError) the message does not fit the receiver's buffer
    +-- PoolExhausted              (also MemoryError) shared memory is at its bound
    +-- EndpointClosed             this endpoint was closed
    +-- ForkedProcess              an endpoint was used in a fork of its process
    +-- RemoteError                the peer's handler raised an error which is not one of ours

Every message says what failed, with which peer, and what to do. What a program may want to act on
is an attribute, given by keyword: `PeerLost("...", peer=peer, epoch=3, operation="recv")`. An
error is rebuilt from `type(error)(error.message, **error.attributes)`, which is how it travels
(and pickles).
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

from rlinf.comm.address import WorkerId


def where_to_look(kind: type[BaseException]) -> str:
    """Where the documentation says what to do about an error of this kind; ends its traceback."""
    return f"see docs/troubleshooting.md#{kind.__name__.lower()}"


class TravellingError(Exception):
    """Rebuilt elsewhere, or unpickled, from its class, its message and its attributes.

    Args:
        message: What failed, with whom, and what to do about it.
        attributes: Values of the class's `FIELDS`; those not given are None.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        unknown = attributes.keys() - set(self.FIELDS)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no attribute {sorted(unknown)}")
        self.add_note(where_to_look(type(self)))
        self.message = message
        for field in self.FIELDS:
            setattr(self, field, attributes.get(field))

    @property
    def attributes(self) -> dict[str, object]:
        """The values of `FIELDS` that were given, by name."""
        return {f: value for f in self.FIELDS if (value := getattr(self, f)) is not None}

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        return _rebuild, (type(self), self.message, self.attributes)


def _rebuild(kind: type[TravellingError], message: str, attributes: dict[str, object]) -> Any:
    return kind(message, **attributes)


class CommError(TravellingError):
    """Base of all errors of this package: catch it to catch them all."""


class ConfigError(CommError):
    """A setting is unknown or makes no sense."""


class Timeout(CommError, TimeoutError):
    """A deadline passed. What was being done may still be going on."""

    FIELDS = ("operation", "peer", "timeout_s")
    operation: str | None
    peer: WorkerId | None
    timeout_s: float | None


class ConnectTimeout(Timeout):
    """No connection to the peer in time: not registered, not running or not reachable."""


class Cancelled(CommError):
    """The handle was cancelled by whoever held it."""

    FIELDS = ("operation",)
    operation: str | None


class PeerLost(CommError, ConnectionError):
    """The peer died or left while the operation needed it."""

    FIELDS = ("epoch", "operation", "peer")
    peer: WorkerId | None
    epoch: int | None
    operation: str | None


class StaleEpoch(CommError, ConnectionError):
    """Meant for an incarnation that has since been replaced (`epoch` is the new one)."""

    FIELDS = ("epoch", "operation", "peer")
    peer: WorkerId | None
    epoch: int | None
    operation: str | None


class UnknownWorker(CommError, LookupError):
    """Nobody is registered under this name."""

    FIELDS = ("peer",)
    peer: WorkerId | None


class AuthenticationError(CommError):
    """The other side does not hold the token of this registry."""

    FIELDS = ("peer",)
    peer: WorkerId | None


class ProtocolError(CommError):
    """The other side speaks another version of the protocol, or sent what makes no sense in it."""

    FIELDS = ("peer",)
    peer: WorkerId | None


class NoTransport(CommError):
    """No transport that both sides have can reach the peer; the message has the arithmetic."""

    FIELDS = ("peer",)
    peer: WorkerId | None


class ServiceUnknown(CommError, LookupError):
    """The peer is there but serves no service of this name."""

    FIELDS = ("peer", "service")
    peer: WorkerId | None
    service: str | None


class CodecError(CommError, ValueError):
    """An object that cannot be encoded, or a message that is no encoding.

    `path` is where in the object: `$.a[3].fn` (None where the message as a whole is malformed).
    """

    FIELDS = ("path",)
    path: str | None


class MessageMismatch(CommError, ValueError):
    """The message that arrived has another dtype or shape than the buffer meant to receive it."""

    FIELDS = ("peer",)
    peer: WorkerId | None


class PoolExhausted(CommError, MemoryError):
    """Shared memory is at its bound and receivers have not given enough of it back in time."""

    FIELDS = ("limit_bytes", "needed_bytes")
    needed_bytes: int | None
    limit_bytes: int | None


class EndpointClosed(CommError):
    """This endpoint was closed."""

    FIELDS = ("operation",)
    operation: str | None


class ForkedProcess(CommError):
    """An endpoint was used in a fork of the process that made it; start processes with spawn."""


class RemoteError(CommError):
    """The peer's handler raised; `kind` is that error's class, `traceback` its text over there."""

    FIELDS = ("kind", "peer", "traceback")
    peer: WorkerId | None
    kind: str | None
    traceback: str | None
