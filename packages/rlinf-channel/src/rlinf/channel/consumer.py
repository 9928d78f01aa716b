"""The half of a channel that gets."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlinf.channel.batching import holds_claims, open_run
from rlinf.channel.cargo import Cargo
from rlinf.channel.devices import open_cargo
from rlinf.channel.errors import ChannelClosed, InvalidConfig, ItemsLost, Timeout
from rlinf.channel.inbox import Inbox
from rlinf.channel.lease import Lease
from rlinf.channel.link import Link
from rlinf.channel.messages import Outcome
from rlinf.channel.run import Run
from rlinf.channel.spans import orders_of
from rlinf.channel.wish import Wish
from rlinf.comm.errors import CodecError
from rlinf.comm.handle import DEFAULT, Handle, TimeoutLike

log = logging.getLogger(__name__)


class Consumer:
    """Gets items, each of them once acknowledged and at least once delivered.

    `get`, `get_batch` and iteration acknowledge what they handed out when they are called again,
    or when `ack` is. The server may hear of it a few calls later, with the next request: what a
    consumer has acknowledged just before it dies may be delivered again. `ack` returns when the
    server knows. `lease` and `lease_batch` say explicitly when an item is done.
    """

    _link: Link
    _inbox: Inbox

    def get(self, timeout: TimeoutLike = DEFAULT, key: str | None = None) -> Any:
        """The next item (of this key); acknowledges what was handed out before.

        Raises:
            Timeout: Nothing came in time; nothing was taken.
            ChannelClosed: Closed and drained: nothing will come.
            CodecError: The item cannot be decoded here: it is dropped and counted as rejected.
            ItemsLost: Likewise, because it had stayed on the accelerator of a process that is gone;
                or the server came back without what was in the channel.
            ServerLost: The server is gone.
        """
        cargo = self._inbox.get(timeout, key)
        try:
            return open_cargo(self._link, cargo)
        except (CodecError, ItemsLost):
            self.reject()
            raise

    def get_async(self, timeout: TimeoutLike = None) -> Handle[Any]:
        """The next item by a handle. Cancel the handle, and the item stays in the channel."""
        return self._inbox.get_async(self._link.seconds(timeout), self._open)

    def get_batch(
        self,
        target_weight: float | None = None,
        max_items: int | None = None,
        timeout: TimeoutLike = DEFAULT,
    ) -> list[Any]:
        """A batch of items; acknowledges what was handed out before.

        Waits for `max_items` items, or for as many as weigh at most `target_weight` (complete
        when the next one would exceed it; a heavier item comes alone), whichever is reached
        first. With neither: everything until the channel is closed. Less comes only from the tail
        of a closed channel, or where the channel's bound is reached before the batch is full.
        Small arrays of one shape and dtype share memory, and so do large items (over 4 KB) that
        were put together, up to 8 MiB of them: keep a `copy()` of what is kept for long.

        Raises:
            Timeout: No batch in time; every item is still in the channel.
            ChannelClosed: Closed and drained.
        """
        wish = _wish(max_items, target_weight)
        runs = self._inbox.take(wish, self._link.deadline(timeout), "get_batch")
        if any(map(holds_claims, runs)):
            return self._good_ones(runs)
        items: list[Any] = []
        try:
            for run in runs:
                items += open_run(run, self._link.endpoint.config.allow_pickle)
        except CodecError:
            return self._good_ones(runs)
        self._inbox.adopt(orders_of(runs))
        return items

    def _good_ones(self, runs: Sequence[Run]) -> list[Any]:
        """What can be decoded of a batch; the rest is dropped."""
        items: list[object] = []
        lease = Lease(self._link, self._inbox, runs)
        for index in range(len(lease)):
            try:
                items.append(lease[index])
            except (CodecError, ItemsLost) as error:
                log.error("channel %s: an item is dropped: %s", self._link.channel, error)
                lease.reject([index])
        lease.adopt()
        return items

    @contextmanager
    def lease(self, timeout: TimeoutLike = DEFAULT) -> Iterator[Any]:
        """One item for the length of a block: acknowledged when it ends well, else returned.

        Raises:
            LeaseLost: At the end of the block: the item had gone to another consumer meanwhile.
        """
        runs = self._inbox.take(Wish(), self._link.deadline(timeout), "lease")
        with Lease(self._link, self._inbox, runs) as lease:
            yield lease[0]

    @contextmanager
    def lease_batch(
        self,
        max_items: int | None = None,
        target_weight: float | None = None,
        timeout: TimeoutLike = DEFAULT,
        *,
        full: bool = True,
    ) -> Iterator[Lease]:
        """A batch like that of `get_batch`, for the length of a block; see `Lease`.

        Args:
            full: False: do not wait for more once there is an item.
        """
        wish = _wish(max_items, target_weight)._replace(full=full)
        runs = self._inbox.take(wish, self._link.deadline(timeout), "lease_batch")
        with Lease(self._link, self._inbox, runs) as lease:
            yield lease

    def ack(self, timeout: TimeoutLike = DEFAULT) -> None:
        """Acknowledge everything handed out so far; returns when the server knows.

        Raises:
            LeaseLost: Some of it had gone back to the queue, and to others, before.
        """
        self._inbox.acknowledge(self._link.deadline(timeout))

    def reject(self, timeout: TimeoutLike = DEFAULT) -> None:
        """Drop what was handed out last as unusable: not redelivered, and counted apart."""
        self._inbox.acknowledge(self._link.deadline(timeout), Outcome.REJECTED)

    def _iterate(self) -> Iterator[Any]:
        while True:
            try:
                item = self.get()
            except Timeout as error:
                log.warning("still waiting: %s", error)
                continue
            except ChannelClosed:
                return
            yield item

    def _open(self, cargo: Cargo) -> object:
        return open_cargo(self._link, cargo)


def _wish(max_items: int | None, target_weight: float | None) -> Wish:
    if max_items is not None and max_items < 1:
        raise InvalidConfig(f"max_items of a batch must be at least 1 or None, not {max_items!r}")
    if target_weight is not None and not target_weight > 0:
        raise InvalidConfig(f"target_weight must be above 0 or None, not {target_weight!r}")
    return Wish(max_items, target_weight, full=True)
