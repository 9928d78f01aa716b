"""The half of a channel that puts."""

import math
from collections.abc import Iterable, Sequence

from rlinf.channel.batching import Loading
from rlinf.channel.devices import Packer
from rlinf.channel.errors import ChannelError, Full, InvalidWeight
from rlinf.channel.link import Link
from rlinf.channel.outbox import BLOCK_BYTES, BLOCK_ITEMS, Outbox
from rlinf.comm.handle import DEFAULT, Handle, TimeoutLike


class Producer:
    """Puts items. What each call promises when it returns:

    `put`, `put_many`
        The items are taken over: they may be changed, and are on their way to the server in order.
        At most `put_window_items` and `put_window_bytes` are on their way at a time. They survive
        the death of a consumer, not yet that of this process. That the server will never hold
        one is told by the next call or by `flush`.
        Near the channel's own bound they wait until the server holds the items.
    `put_async(...).result()`, `flush`, `close`, and put with `put_window_items=0`
        The server holds the items: they survive the death of this process.
    """

    _link: Link
    _outbox: Outbox
    _packer: Packer

    def put(
        self,
        item: object,
        weight: float = 1.0,
        key: str | None = None,
        timeout: TimeoutLike = DEFAULT,
    ) -> None:
        """Put one item.

        Args:
            item: Any object that `rlinf.comm` can encode.
            weight: What it costs to work on it, in any unit; above 0.
            key: For consumers that ask for this key only. Order is kept for each key.
            timeout: Seconds to wait for room; None: for ever.

        Raises:
            Full: No room by then; the item is not in the channel.
            ChannelClosed: The channel is closed.
            InvalidWeight, ItemTooLarge: The item can never be accepted.
            ServerLost: The server is gone.
        """
        self._check(weight)
        cargo = self._packer.pack(item)
        try:
            self._outbox.add(cargo, weight, key, timeout)
        except ChannelError:
            self._packer.forget(cargo)
            raise

    def put_async(self, item: object, weight: float = 1.0, key: str | None = None) -> Handle[None]:
        """Put one item; the handle is done when the server holds it. Never waits for room.

        Raises, by the handle: ChannelClosed, ServerLost.
        """
        self._check(weight)
        cargo = self._packer.pack(item)
        return self._outbox.add_async(cargo, weight, key)

    def put_many(
        self,
        items: Iterable[object],
        weights: Sequence[float] | None = None,
        keys: Sequence[str | None] | None = None,
        timeout: TimeoutLike = DEFAULT,
    ) -> None:
        """Put several items in order, many to a message.

        Raises:
            Full: No room for all by the deadline; `accepted` says how many of them are in (or on
                their way), the others are not.
            And what `put` raises; then, too, those before the failing one are in.
        """
        deadline = self._link.deadline(timeout)
        message = Loading()
        accepted = 0
        for index, item in enumerate(items):
            weight = 1.0 if weights is None else weights[index]
            self._check(weight)
            cargo = self._packer.pack(item)
            message.add(cargo, weight, None if keys is None else keys[index])
            if message.nbytes >= BLOCK_BYTES or message.count >= BLOCK_ITEMS:
                self._add_all(message, deadline, accepted)
                accepted += message.count
                message = Loading()
        if message.count:
            self._add_all(message, deadline, accepted)

    def flush(self, timeout: TimeoutLike = DEFAULT) -> None:
        """Wait until the server holds everything put before.

        Raises:
            Full: It does not by the deadline; the items stay on their way.
            ChannelClosed, ServerLost: Some of it will never be held.
        """
        self._outbox.flush(self._link.deadline(timeout))

    def _add_all(self, message: Loading, deadline: float | None, before: int) -> None:
        try:
            self._outbox.add_all(message, deadline)
        except Full as error:
            raise Full(error.channel, error.state, before + error.accepted) from error

    def _check(self, weight: float) -> None:
        try:
            good = 0 < weight < math.inf
        except TypeError:
            good = False
        if not good:
            raise InvalidWeight(self._link.channel, weight)
