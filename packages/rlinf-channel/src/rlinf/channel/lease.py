"""Lease: items that are one consumer's until it settles them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlinf.channel.batching import cargos
from rlinf.channel.cargo import Cargo
from rlinf.channel.devices import open_cargo
from rlinf.channel.errors import (
    ChannelClosed,
    ChannelError,
    Full,
    InvalidConfig,
    LeaseLost,
    SpoolFull,
)
from rlinf.channel.inbox import Inbox
from rlinf.channel.link import GRACE_S, Link, ServerAway, rebuild
from rlinf.channel.loading import Loading
from rlinf.channel.messages import Outcome
from rlinf.channel.run import Run
from rlinf.channel.spans import Ranges, ranges
from rlinf.comm.errors import CommError
from rlinf.comm.handle import DEFAULT, TimeoutLike

if TYPE_CHECKING:
    from rlinf.channel.channel import Channel


class Commit:
    """A commit on its way to the server, and to the next where that one dies.

    Args:
        lease: Whose items it settles.
        indexes: Which of them.
        to: Where its outputs go.
        first: Number of the first output.
        fields: Of the request.
        limit: Seconds the server has for it; None: for ever.
    """

    def __init__(
        self,
        lease: "Lease",
        indexes: tuple[int, ...],
        to: "Channel",
        first: int,
        fields: tuple[object, ...],
        limit: float | None,
    ) -> None:
        self._lease, self._indexes = lease, indexes
        self._link, self._outbox, self._first = lease._link, to._outbox, first
        self._target = to._link.channel
        self._fields = fields
        self._deadline = None if limit is None else time.monotonic() + limit + GRACE_S
        self._reply = self._link.call("commit", *fields)

    def done(self) -> bool:
        """Whether the server has answered, or is lost."""
        return self._reply.done()

    def wait(self, timeout: TimeoutLike = DEFAULT) -> None:
        """Wait for its answer.

        Raises:
            Timeout: It did not come in time.
        """
        self._link.wait(self._reply, "commit", timeout)

    def conclude(self) -> None:
        """Settle the items as the server says, or raise what `Lease.commit_items` says.

        A server that died before it answered is waited for, and asked again.
        """
        accepted = False
        try:
            self._answer()
            accepted = True
        except LeaseLost:
            self._lease._forget(self._indexes)
            raise
        except (ChannelClosed, Full, SpoolFull) as error:  # of the channel that it puts to
            raise rebuild(type(error).__name__, (self._target, *error.values[1:])) from None
        finally:
            self._outbox.reserved(self._first, accepted=accepted)
        self._lease._forget(self._indexes)

    def _answer(self) -> None:
        try:
            self._link.result(self._reply, "commit", self._link.remaining(self._deadline))
        except ServerAway:
            left = self._link.remaining(self._deadline)
            self._link.ask("commit", *self._fields, timeout=left)


class Lease:
    """Items taken together, in order. A context manager: what is left of the lease when the block
    ends well is acknowledged; when it ends with an exception it goes back to the front.

    An item is decoded when it is first looked at; one that cannot be raises `CodecError` then,
    and can be dropped by `reject`.
    """

    def __init__(self, link: Link, inbox: Inbox, runs: Sequence[Run]) -> None:
        self._link = link
        self._inbox = inbox
        tags = [range(run.order, run.order + run.count) for run in runs]
        self._tags: list[int | None] = list(chain.from_iterable(tags))
        self._cargos: list[Cargo | None] = list(chain.from_iterable(map(cargos, runs)))
        self._values: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self._tags)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        cargo = self._cargos[index]
        if cargo is not None:
            self._values[index] = open_cargo(self._link, cargo)
            self._cargos[index] = None
        return self._values[index]

    @property
    def held(self) -> tuple[int, ...]:
        """Indexes of the items that are not settled yet."""
        return tuple(index for index, tag in enumerate(self._tags) if tag is not None)

    def ack(self, indexes: Sequence[int] | None = None, timeout: TimeoutLike = DEFAULT) -> None:
        """Acknowledge these items (None: all that are left); returns when the server knows.

        Raises:
            LeaseLost: The lease had ended; the items went to others.
        """
        self._settle(indexes, Outcome.DONE, timeout)

    def reject(self, indexes: Sequence[int] | None = None, timeout: TimeoutLike = DEFAULT) -> None:
        """Drop these items as unusable: they are not redelivered, and are counted apart."""
        self._settle(indexes, Outcome.REJECTED, timeout)

    def release(self, indexes: Sequence[int] | None = None, timeout: TimeoutLike = DEFAULT) -> None:
        """Give these items back to the front of the channel."""
        self._settle(indexes, Outcome.RETURNED, timeout)

    def commit(
        self,
        outputs: Sequence[tuple[object, float]],
        to: "Channel",
        timeout: TimeoutLike = DEFAULT,
    ) -> None:
        """Put (item, weight) pairs into `to` and acknowledge the whole lease: both, or neither.

        See `commit_items`.
        """
        self.commit_items(self.held, outputs, to, timeout)

    def commit_items(
        self,
        indexes: Sequence[int],
        outputs: Sequence[tuple[object, float]],
        to: "Channel",
        timeout: TimeoutLike = DEFAULT,
    ) -> None:
        """Put outputs into `to` and acknowledge the items at `indexes`: both, or neither.

        The server does it in one step, once `to` has room for all outputs (for more than its
        bound once it is empty). A consumer that is killed, at whatever moment, causes neither a
        loss nor a duplicate downstream. The outputs come after everything put to `to` before.

        Raises:
            LeaseLost: The lease had ended: nothing was put. Drop the outputs.
            Full: `to` had no room by the deadline: nothing was put, the lease goes on.
            ChannelClosed: `to` is closed: nothing was put.
        """
        if not outputs:
            self.ack(indexes, timeout)
            return
        self._commit(indexes, outputs, to, timeout).conclude()

    def commit_later(
        self,
        indexes: Sequence[int],
        outputs: Sequence[tuple[object, float]],
        to: "Channel",
        timeout: TimeoutLike = DEFAULT,
    ) -> "Commit":
        """`commit_items` without waiting for the server; call `conclude` on what it returns."""
        return self._commit(indexes, outputs, to, timeout, own=True)

    def _commit(
        self,
        indexes: Sequence[int],
        outputs: Sequence[tuple[object, float]],
        to: "Channel",
        timeout: TimeoutLike,
        *,
        own: bool = False,
    ) -> "Commit":
        """`own`: outputs may change before the answer, and may have to be sent again."""
        link, target = self._link, to._link
        if (target.server, target.endpoint) != (link.server, link.endpoint):
            raise InvalidConfig(
                f"commit from channel '{link.channel}' on {link.server} to '{target.channel}' on "
                f"{target.server}: both must be on one server and opened by the same endpoint"
            )
        message = Loading()
        for item, weight in outputs:
            to._check(weight)
            message.add(to._packer.pack(item), weight, None)
        if own:
            to._outbox.own(message)
        tags = self._held_tags(indexes)
        first = to._outbox.reserve(message.count)
        place = target.channel, target.number, first
        limit = link.seconds(timeout)
        fields = tags, place, tuple(message.crate()), limit
        return Commit(self, tuple(indexes), to, first, fields, limit)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.held:
            return
        if kind is None:
            self.ack()
            return
        with suppress(ChannelError, CommError):  # the error under way says more
            self.release()

    def adopt(self) -> None:
        """Have what is left acknowledged by the next get."""
        self._inbox.adopt(self._held_tags(self.held))

    def _held_tags(self, indexes: Sequence[int]) -> Ranges:
        tags: list[int] = []
        for index in indexes:
            tag = self._tags[index]
            if tag is None:
                raise IndexError(f"item {index} of this lease is settled already")
            tags.append(tag)
        return ranges(sorted(tags))

    def _forget(self, indexes: Sequence[int]) -> None:
        self._inbox.release(self._held_tags(indexes))
        for index in indexes:
            self._tags[index] = None

    def _settle(
        self, indexes: Sequence[int] | None, outcome: Outcome, timeout: TimeoutLike
    ) -> None:
        chosen = self.held if indexes is None else tuple(indexes)
        tags = self._held_tags(chosen)
        self._forget(chosen)
        if tags:
            deadline = self._link.deadline(timeout)
            self._inbox.settle(tags, outcome, deadline)
