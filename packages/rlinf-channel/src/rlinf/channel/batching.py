"""Many items in one message: small ones share a block of bytes, large ones travel as parcels.

A small item (all of it within `SMALL_BYTES`) is copied into the block and costs no codec on the
way: the server cuts the block into slices, and joins slices of many producers into the block of
one delivery, without ever looking inside. A large item stays a closed `Parcel`, whose buffers the
transport moves by reference where it can.

Block slices start at multiples of 16 bytes. A slice is either the bytes of a `bytes` object
itself, or a parcel: the number of its parts, their sizes, then header and buffers, each at a
multiple of 16.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rlinf.comm.codec import Parcel

SMALL_BYTES = 4096
ALIGN = 16

_ROW = struct.Struct("<dQB")
_COUNT = struct.Struct("<I")
_PADDING = tuple(bytes(n) for n in range(ALIGN))

RAW, SMALL, LARGE = 0, 1, 2

Bytes = bytes | bytearray | memoryview


class Cargo(NamedTuple):
    """One item as it travels and waits: closed."""

    kind: int
    """RAW, SMALL or LARGE."""
    nbytes: int
    """Size without padding."""
    content: "Bytes | Parcel"
    """The padded slice, or the parcel."""


class Crate(NamedTuple):
    """Items in one message; the fields of the wire."""

    rows: bytes
    """Weight, size and kind of each item, in order."""
    block: Bytes
    """The slices of the small items, in order."""
    parcels: list[Parcel]
    """The large items, in order."""
    keys: list[str | None] | None
    """The key of each item; None if none has one."""


def pack(value: object, *, allow_pickle: bool = True) -> Cargo:
    """Close an object. A small one is copied; a large one is still a view on its memory.

    Raises:
        CodecError: It cannot be encoded.
    """
    if type(value) is bytes and len(value) <= SMALL_BYTES:
        return Cargo(RAW, len(value), value + _PADDING[-len(value) % ALIGN])
    parcel = Parcel.pack(value, allow_pickle=allow_pickle)
    if parcel.nbytes > SMALL_BYTES:
        return Cargo(LARGE, parcel.nbytes, parcel)
    return Cargo(SMALL, parcel.nbytes, _flatten(parcel))


def unpack(cargo: Cargo, *, allow_pickle: bool = True) -> object:
    """Open an item. A small one gets memory of its own; a large one keeps what it arrived in.

    Raises:
        CodecError: It cannot be decoded here.
    """
    content = cargo.content
    if isinstance(content, Parcel):
        return content.open(allow_pickle=allow_pickle)
    if cargo.kind == RAW:
        return bytes(content[: cargo.nbytes])
    return _parcel(content).open(allow_pickle=allow_pickle)


def crate(items: Sequence[tuple[Cargo, float, str | None]]) -> Crate:
    """Put (cargo, weight, key) of several items into one message."""
    row = _ROW.pack
    rows = b"".join([row(weight, cargo.nbytes, cargo.kind) for cargo, weight, _ in items])
    slices = [cargo.content for cargo, _, _ in items if not isinstance(cargo.content, Parcel)]
    parcels = [cargo.content for cargo, _, _ in items if isinstance(cargo.content, Parcel)]
    keys = [key for _, _, key in items]
    keyed = any(key is not None for key in keys)
    block = slices[0] if len(slices) == 1 else b"".join(slices)
    return Crate(rows, block, parcels, keys if keyed else None)


def uncrate(message: Crate) -> list[tuple[Cargo, float, str | None]]:
    """The (cargo, weight, key) of each item; slices are views on the message.

    Raises:
        ValueError: The message is malformed.
    """
    try:
        return _read(message)
    except (struct.error, IndexError, TypeError) as error:
        raise ValueError(f"malformed items: {error}") from error


def _read(message: Crate) -> list[tuple[Cargo, float, str | None]]:
    rows, block, parcels, keys = message
    view = block if isinstance(block, memoryview) else memoryview(block)
    items: list[tuple[Cargo, float, str | None]] = []
    at = large = 0
    count = len(rows) // _ROW.size
    names: Iterable[str | None] = (None,) * count if keys is None else keys
    for (weight, nbytes, kind), key in zip(_ROW.iter_unpack(rows), names, strict=True):
        if kind == LARGE:
            items.append((Cargo(kind, nbytes, parcels[large]), weight, key))
            large += 1
            continue
        end = at + (_slice_bytes(view, at) if kind == SMALL else nbytes + -nbytes % ALIGN)
        items.append((Cargo(kind, nbytes, view[at:end]), weight, key))
        at = end
    if at != len(view) or large != len(parcels):
        raise ValueError(
            f"{len(view)} bytes and {len(parcels)} parcels hold items of {at} bytes and {large}"
        )
    return items


def _flatten(parcel: Parcel) -> bytes:
    parts: list[Bytes] = [parcel.header, *parcel.buffers]
    head = struct.pack(f"<I{len(parts)}I", len(parts), *map(len, parts))
    padded: list[Bytes] = []
    for part in (head, *parts):
        padded.append(part)
        padded.append(_PADDING[-len(part) % ALIGN])
    return b"".join(padded)


def _sizes(view: Bytes, at: int) -> tuple[int, ...]:
    (count,) = _COUNT.unpack_from(view, at)
    if count * 4 > len(view) - at:
        raise ValueError(f"{count} parts in {len(view) - at} bytes")
    return struct.unpack_from(f"<{count}I", view, at + 4)


def _slice_bytes(view: Bytes, at: int) -> int:
    sizes = _sizes(view, at)
    head = 4 + 4 * len(sizes)
    return sum(size + -size % ALIGN for size in (head, *sizes))


def _parcel(content: Bytes) -> Parcel:
    """The parcel in a slice, in memory of its own: the block can go, and arrays are writable."""
    sizes = _sizes(content, 0)
    own = memoryview(bytearray(content))
    at = 4 + 4 * len(sizes)
    at += -at % ALIGN
    parts: list[memoryview] = []
    for size in sizes:
        parts.append(own[at : at + size])
        at += size + -size % ALIGN
    return Parcel(bytes(parts[0]), tuple(parts[1:]))
