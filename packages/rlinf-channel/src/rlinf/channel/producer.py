"""The half of a channel that puts."""

import math
from collections.abc import Iterable, Sequence

from rlinf.channel.batching import pack
from rlinf.channel.errors import Full, InvalidWeight, ItemTooLarge
from rlinf.channel.link import Link
from rlinf.channel.outbox import BLOCK_BYTES, BLOCK_ITEMS, Loaded, Outbox
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
        self._outbox.add([self._load(item, weight, key)], self._link.deadline(timeout), gather=True)

    def put_async(self, item: object, weight: float = 1.0, key: str | None = None) -> Handle[None]:
        """Put one item; the handle is done when the server holds it. Never waits for room.

        Raises, by the handle: ChannelClosed, ServerLost.
        """
        loaded = self._load(item, weight, key)
        return self._outbox.add_async(loaded, f"put to channel {self._link.channel}")

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
        batch: list[Loaded] = []
        nbytes = accepted = 0
        for index, item in enumerate(items):
            weight = 1.0 if weights is None else weights[index]
            loaded = self._load(item, weight, None if keys is None else keys[index])
            batch.append(loaded)
            nbytes += loaded[0].nbytes
            if nbytes >= BLOCK_BYTES or len(batch) >= BLOCK_ITEMS:
                accepted += self._add(batch, deadline, accepted)
                batch, nbytes = [], 0
        if batch:
            self._add(batch, deadline, accepted)

    def flush(self, timeout: TimeoutLike = DEFAULT) -> None:
        """Wait until the server holds everything put before.

        Raises:
            Full: It does not by the deadline; the items stay on their way.
            ChannelClosed, ServerLost: Some of it will never be held.
        """
        self._outbox.flush(self._link.deadline(timeout))

    def _add(self, batch: list[Loaded], deadline: float | None, before: int) -> int:
        try:
            self._outbox.add(batch, deadline, gather=False)
        except Full as error:
            raise Full(error.channel, error.state, before + error.accepted) from error
        return len(batch)

    def _load(self, item: object, weight: float, key: str | None) -> Loaded:
        link = self._link
        if not (isinstance(weight, int | float) and 0 < weight < math.inf):
            raise InvalidWeight(link.channel, weight)
        cargo = pack(item, allow_pickle=link.endpoint.config.allow_pickle)
        if cargo.nbytes > link.config.buffer_bytes:
            raise ItemTooLarge(link.channel, cargo.nbytes, link.config.buffer_bytes)
        return cargo, float(weight), key
