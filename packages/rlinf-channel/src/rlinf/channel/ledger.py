"""Records of the journal as bytes: what a spool writes and reads. Items stay closed.

A unit (the records of one step) is a header in JSON and the parts it names by their sizes: the
columns, blocks and parcels of the items, as they came from their producers.
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
from rlinf.channel.messages import ClientId, Item, Outcome
from rlinf.channel.tags import expand, ranges
from rlinf.comm.codec import Parcel

_LENGTH = struct.Struct("<I")

Parts = list[Bytes]


class _Writer:
    """Collects rows for the header, and parts."""

    def __init__(self) -> None:
        self.parts: Parts = []

    def items(self, items: Sequence[Item]) -> list[Any]:
        """Items as a row: their keys and the sizes of their parts."""
        crate = collect(items)
        parts: Parts = [crate.columns, crate.block]
        for parcel in crate.parcels:
            parts += [parcel.header, *parcel.buffers]
        self.parts += parts
        counts = [len(parcel.buffers) for parcel in crate.parcels]
        return [crate.keys, [memoryview(part).nbytes for part in parts], counts]

    def row(self, record: Record) -> list[Any]:
        """One record."""
        match record:
            case Opened(channel, birth, config):
                return ["opened", channel, birth, asdict(config)]
            case Closed(channel):
                return ["closed", channel]
            case Deleted(channel):
                return ["deleted", channel]
            case Admitted(channel, producer, first, order, items):
                return ["admitted", channel, producer, first, order, self.items(items)]
            case Finished(channel, consumer, tags, orders, outcome):
                gone = ranges(tags), ranges(sorted(orders))
                return ["finished", channel, consumer, *gone, outcome.value]
            case Held(token, client, devices, order):
                return ["held", token, client, devices, order]
            case Freed(token):
                return ["freed", token]

    def state(self, state: ChannelState) -> list[Any]:
        """A whole channel."""
        both = []
        for items in (state.items, state.dead):
            returns = {order: item.returns for order, item in items.items() if item.returns}
            both.append([ranges(items), list(returns.items()), self.items(list(items.values()))])
        return [
            "state",
            [state.name, state.birth, asdict(state.config), state.closed],
            [state.orders, state.acknowledged, state.rejected],
            [[client, p.next, p.refused] for client, p in state.producers.items()],
            [[client, ranges(tags)] for client, tags in state.settled.items()],
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

    def items(self, row: list[Any], channel: str) -> list[Item]:
        """The items of a row."""
        keys, sizes, counts = row
        parts = [self._part(size) for size in sizes]
        columns, block, *rest = parts
        parcels = []
        for count in counts:
            header, buffers, rest = rest[0], rest[1 : count + 1], rest[count + 1 :]
            parcels.append(Parcel(bytes(header), tuple(buffers)))
        return shelve(Crate(columns, block, parcels, keys), channel)

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
                gone = expand(tuple(tags)), expand(tuple(orders))
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
            runs = [(first, last) for first, last in refused]
            state.producers[ClientId(*client)] = ProducerState(number, runs)
        for client, tags in settled:
            state.settled[ClientId(*client)] = list(expand(tuple(tags)))
        for place, (orders, returns, items) in zip((state.items, state.dead), both, strict=True):
            counts = dict(map(tuple, returns))
            found = self.items(items, name)
            for order, item in zip(expand(tuple(orders)), found, strict=True):
                item.order, item.returns = order, counts.get(order, 0)
                place[order] = item
        return state
