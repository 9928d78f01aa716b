"""Records of the journal as bytes: what a spool writes and reads. Items stay closed.

A unit (the records of one step) is a header in JSON and the parts it names by their sizes: the
figures, blocks and parcels of the items, as they came from their producers.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rlinf.channel.batching import Crate, collect, shelve
from rlinf.channel.cargo import Bytes
from rlinf.channel.config import ChannelConfig
from rlinf.channel.journal import (
    Admitted,
    ChannelState,
    Closed,
    Deleted,
    Finished,
    Freed,
    Held,
    Opened,
    ProducerState,
    Record,
    ServerState,
)
from rlinf.channel.messages import ClientId, Outcome
from rlinf.channel.run import Run
from rlinf.channel.spans import Spans
from rlinf.comm.codec import Parcel

_LENGTH = struct.Struct("<I")

Parts = list[Bytes]


class _Writer:
    """Collects rows for the header, and parts."""

    def __init__(self) -> None:
        self.parts: Parts = []

    def items(self, runs: Sequence[Run]) -> list[Any]:
        """Items as a row, a crate each: figures, keys and the sizes of its parts."""
        return [self.crate(crate) for crate in collect(runs)]

    def crate(self, crate: Crate) -> list[Any]:
        """One crate."""
        count, *columns, block, parcels, keys = crate
        figures = [column if isinstance(column, int | float) else None for column in columns]
        parts: Parts = [column for column in columns if not isinstance(column, int | float)]
        parts.append(block)
        for parcel in parcels:
            parts += [parcel.header, *parcel.buffers]
        self.parts += parts
        sizes = [memoryview(part).nbytes for part in parts]
        return [count, figures, sizes, [len(parcel.buffers) for parcel in parcels], keys]

    def row(self, record: Record) -> list[Any]:
        """One record."""
        match record:
            case Opened(channel, birth, config):
                return ["opened", channel, birth, asdict(config)]
            case Closed(channel):
                return ["closed", channel]
            case Deleted(channel):
                return ["deleted", channel]
            case Admitted(channel, producer, first, order, runs):
                return ["admitted", channel, producer, first, order, self.items(runs)]
            case Finished(channel, consumer, tags, orders, outcome):
                return ["finished", channel, consumer, tags, orders, outcome.value]
            case Held(token, client, devices, order):
                return ["held", token, client, devices, order]
            case Freed(token):
                return ["freed", token]

    def state(self, state: ChannelState) -> list[Any]:
        """A whole channel."""
        both = [
            [[order, run.returns, self.items([run])] for order, run in runs]
            for runs in (state.items, state.dead)
        ]
        return [
            "state",
            [state.name, state.birth, asdict(state.config), state.closed],
            [state.orders, state.acknowledged, state.rejected],
            [[client, p.next, p.refused] for client, p in state.producers.items()],
            [[client, tags.ranges()] for client, tags in state.settled.items()],
            *both,
        ]

    def unit(self, rows: list[list[Any]]) -> Parts:
        """The whole unit."""
        header = json.dumps(rows, separators=(",", ":")).encode()
        return [_LENGTH.pack(len(header)) + header, *self.parts]


def encode(records: Iterable[Record]) -> Parts:
    """The records of one step as one unit."""
    writer = _Writer()
    return writer.unit([writer.row(record) for record in records])


def encode_state(state: ServerState) -> Parts:
    """Everything a server goes on with as one unit."""
    writer = _Writer()
    rows = [writer.state(channel) for channel in state.channels.values()]
    return writer.unit(rows + [writer.row(held) for held in state.grants.values()])


def decode(unit: memoryview, state: ServerState) -> None:
    """Add what a unit says to a state.

    Raises:
        ValueError, KeyError, TypeError, IndexError, struct.error: It does not make sense.
    """
    (length,) = _LENGTH.unpack_from(unit)
    rows = json.loads(bytes(unit[4 : 4 + length]))
    reader = _Reader(unit[4 + length :])
    for row in rows:
        if row[0] == "state":
            channel = reader.state(row)
            state.channels[channel.name] = channel
        else:
            state.replay([reader.record(row)])


class _Reader:
    """Takes rows apart, and the parts after the header, in order."""

    def __init__(self, parts: memoryview) -> None:
        self._left = parts

    def items(self, row: list[Any], channel: str) -> list[Run]:
        """The items of a row."""
        return [run for crate in row for run in shelve(self.crate(crate), channel)]

    def crate(self, row: list[Any]) -> Crate:
        """One crate."""
        count, figures, sizes, counts, keys = row
        rest = [self._part(size) for size in sizes]
        columns = [rest.pop(0) if figure is None else figure for figure in figures]
        block, *rest = rest
        parcels = []
        for buffers in counts:
            header, own, rest = rest[0], rest[1 : buffers + 1], rest[buffers + 1 :]
            parcels.append(Parcel(bytes(header), tuple(own)))
        return Crate(count, *columns, block, parcels, keys)  # type: ignore[arg-type, call-arg]

    def _part(self, size: int) -> memoryview:
        part, self._left = self._left[:size], self._left[size:]
        if part.nbytes != size:
            raise ValueError(f"a part of {size} bytes is cut short")
        return part

    def record(self, row: list[Any]) -> Record:
        """The record of a row."""
        match row:
            case ["opened", channel, birth, config]:
                return Opened(channel, birth, ChannelConfig.from_dict(config))
            case ["closed", channel]:
                return Closed(channel)
            case ["deleted", channel]:
                return Deleted(channel)
            case ["admitted", channel, producer, first, order, items]:
                found = self.items(items, channel)
                return Admitted(channel, ClientId(*producer), first, order, found)
            case ["finished", channel, consumer, tags, orders, outcome]:
                gone = tuple(tags), tuple(orders)
                return Finished(channel, ClientId(*consumer), *gone, Outcome(outcome))
            case ["held", token, client, devices, order]:
                return Held(token, ClientId(*client), tuple(devices), tuple(order))
            case ["freed", token]:
                return Freed(token)
        raise ValueError(f"an unknown kind of record: {row[:1]}")

    def state(self, row: list[Any]) -> ChannelState:
        """The channel of a row."""
        _, (name, birth, config, closed), counts, producers, settled, *both = row
        state = ChannelState(name, birth, ChannelConfig.from_dict(config), closed, *counts)
        for client, number, refused in producers:
            state.producers[ClientId(*client)] = ProducerState(number, tuple(refused))
        for client, tags in settled:
            state.settled[ClientId(*client)] = Spans(tags)
        for place, runs in zip((state.items, state.dead), both, strict=True):
            for order, returns, items in runs:
                for run in self.items(items, name):
                    run.order, run.returns = order, returns
                    place.add(order, run)
                    order += run.count
        return state
