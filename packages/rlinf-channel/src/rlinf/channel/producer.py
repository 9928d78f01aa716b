"""The half of a channel that puts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from rlinf.channel.cargo import Cargo
from rlinf.channel.devices import Packer
from rlinf.channel.errors import ChannelError, Full, InvalidWeight
from rlinf.channel.link import Link
from rlinf.channel.loading import Loading
from rlinf.channel.outbox import BLOCK_BYTES, BLOCK_ITEMS, Outbox
from rlinf.channel.run import Column
from rlinf.comm.errors import CodecError
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
            ValueError: There are fewer weights or keys than items.
            And what `put` raises; then, too, those before the failing one are in.
        """
        deadline = self._link.deadline(timeout)
        rest, at = iter(items), 0
        while chunk := list(islice(rest, BLOCK_ITEMS)):
            end = at + len(chunk)
            some = 1.0 if weights is None else tuple(weights[at:end])
            named = None if keys is None else list(keys[at:end])
            for what, given in (("weights", some), ("keys", named)):
                if isinstance(given, tuple | list) and len(given) != len(chunk):
                    raise ValueError(f"put_many: there are fewer {what} than items")
            self._put_chunk(chunk, some, named, deadline, at)
            at = end

    def _put_chunk(
        self,
        items: list[object],
        weights: Column,
        keys: Sequence[str | None] | None,
        deadline: float | None,
        before: int,
    ) -> None:
        """Put those before the first that cannot be put, and raise what is wrong with it.

        `before`: So many of the same `put_many` are in already.
        """
        good = len(items) if isinstance(weights, float) else self._good(weights)
        if good == len(items) and self._packer.plain:
            message = Loading()
            if message.add_alike(items, weights, keys, self._link.endpoint.empty):
                self._add_all(message, deadline, before)
                return
        each = [weights] * len(items) if isinstance(weights, float) else weights
        named = [None] * len(items) if keys is None else keys
        cargos: list[Cargo] = []
        failed: Exception | None = None
        try:
            cargos += map(self._packer.pack, items[:good])  # those before the one that fails are in
        except CodecError as error:
            failed = error
        for first, last in _messages(cargos):
            message = Loading()
            for at in range(first, last):
                message.add(cargos[at], each[at], named[at])
            self._add_all(message, deadline, before + first)
        if failed is not None:
            raise failed
        if good < len(items):
            raise InvalidWeight(self._link.channel, each[good])

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
        if not _is_good(weight):
            raise InvalidWeight(self._link.channel, weight)

    @staticmethod
    def _good(weights: Sequence[float]) -> int:
        """How many from the start on are weights."""
        with suppress(TypeError):
            if min(weights) > 0 and math.isfinite(sum(weights)):
                return len(weights)
        return next((i for i, w in enumerate(weights) if not _is_good(w)), len(weights))


def _is_good(weight: float) -> bool:
    try:
        return 0 < weight < math.inf
    except TypeError:
        return False


def _messages(cargos: Sequence[Cargo]) -> Iterator[tuple[int, int]]:
    """First and behind the last of each message; one ends when it reaches `BLOCK_BYTES`."""
    sizes = [cargo[1] for cargo in cargos]
    first = 0
    if sum(sizes) >= BLOCK_BYTES:
        nbytes = 0
        for index, size in enumerate(sizes):
            nbytes += size
            if nbytes >= BLOCK_BYTES:
                yield first, index + 1
                first, nbytes = index + 1, 0
    if first < len(cargos):
        yield first, len(cargos)
