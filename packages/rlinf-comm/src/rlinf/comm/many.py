"""Many: small messages sent and received many at a time, each still a message of its own.

One message costs a system call and a walk through all floors on either side; many together share
them. Nothing is ever held back for it: who has one message sends it, who has many says so.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlinf.comm.address import WorkerId
from rlinf.comm.bundle import tie
from rlinf.comm.frame import MANY, RAW
from rlinf.comm.handle import DEFAULT, TimeoutLike
from rlinf.comm.mailbox import ANY, Any_
from rlinf.comm.transports.base import small
from rlinf.comm.window import LETTER_BYTES

if TYPE_CHECKING:
    from rlinf.comm.endpoint import Endpoint

SMALL_BYTES = 1 << 12
BUNDLE_BYTES = 1 << 15
BUNDLE_MESSAGES = 256


class Many:
    """The plural of an endpoint's `send` and `recv`; `Endpoint.many`."""

    __slots__ = ("_endpoint",)

    def __init__(self, endpoint: "Endpoint") -> None:
        self._endpoint = endpoint

    def send(
        self,
        messages: Iterable[object],
        to: str | WorkerId,
        *,
        tag: int = 0,
        timeout: TimeoutLike = DEFAULT,
    ) -> None:
        """Send each object as a message of its own: those of up to 4 KiB many in one frame.

        Args:
            messages: Taken one by one, so it may be a generator.
            to: Who receives them, in this order.
            tag: Of all of them.
            timeout: In seconds, for each frame.

        Raises:
            As `Endpoint.send`; what came before may have been sent.
        """
        one = self._endpoint
        for flags, group in self._groups(messages):
            if flags is None:
                one.send(group[0], to, tag=tag, timeout=timeout)
            else:
                self._send(group, flags, to, tag, timeout)

    def recv(
        self,
        source: str | WorkerId | Any_ = ANY,
        *,
        tag: int = 0,
        most: int = 4 * BUNDLE_MESSAGES,
        timeout: TimeoutLike = DEFAULT,
    ) -> list[Any]:
        """Receive what has come, in order: at least one message, and no more than `most`.

        Args:
            source: From whom; ANY: whoever sent first.
            tag: Which messages.
            most: 1 or more.
            timeout: In seconds, for the first one.

        Raises:
            As `Endpoint.recv`.
        """
        one = self._endpoint
        one._check()
        who = ANY if isinstance(source, Any_) else one._peer(source).id
        found: list[Any] = []
        one._exchange.take(who, tag, most, found)
        if not found:
            found.append(one.recv(source, tag=tag, timeout=timeout))
            one._exchange.take(who, tag, most, found)
        return found

    def _groups(self, messages: Iterable[object]) -> Iterator[tuple[int | None, Sequence[Any]]]:
        """Runs of small messages, encoded, with their flags; others alone, as they are (None)."""
        every = iter(messages)
        while some := list(itertools.islice(every, BUNDLE_MESSAGES)):
            raw = [message for message in some if type(message) is bytes]
            if len(raw) == len(some) and sum(map(len, raw)) <= BUNDLE_BYTES:
                yield RAW, raw
            else:
                yield from self._mixed(some)

    def _mixed(self, messages: Sequence[object]) -> Iterator[tuple[int | None, Sequence[Any]]]:
        encode = self._endpoint._exchange.encode
        group: list[bytes] = []
        size, kind = 0, RAW
        for message in messages:
            flags, header, buffers = encode(message)
            alone = bool(buffers) or len(header) > SMALL_BYTES
            if group and (alone or flags != kind or size + len(header) > BUNDLE_BYTES):
                yield kind, group
                group, size = [], 0
            if alone:
                yield None, [message]
                continue
            kind = flags
            group.append(header)
            size += len(header)
        if group:
            yield kind, group

    def _send(
        self, group: Sequence[bytes], flags: int, to: str | WorkerId, tag: int, timeout: TimeoutLike
    ) -> None:
        one = self._endpoint
        one._check()
        frame = small(tag, flags | MANY, tie(group))
        frame.nbytes = sum(map(len, group)) + (len(group) - 1) * LETTER_BYTES
        one._send(frame, one._peer(to), timeout, len(group))
