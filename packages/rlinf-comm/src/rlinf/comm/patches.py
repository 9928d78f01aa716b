"""patches: a lossless codec for rendered frames. Most of a frame is what it was in the one before.

Frames (..., height, width, channels) are cut into patches of 8 x 8; the first axis is time if
there are more than three. A patch that did not change since the frame before is not sent; one of a
single colour is sent as one pixel; all others as they are, or through zlib.

    data = level, packed bits: changed?, packed bits of those changed: of one colour?, size of what
           follows, pixels of one-colour patches, all other patches
"""

import struct
import zlib
from typing import Any, Final

import numpy as np

EDGE: Final = 8
_HEAD: Final = struct.Struct("<BQ")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Patches:
    """See the module.

    Args:
        level: Of zlib; 0: without.
    """

    def __init__(self, level: int = 0) -> None:
        self._level = level

    def encode(self, array: "np.ndarray[Any, Any]") -> bytes:
        """Arrays of fewer than three axes are taken as one row of pixels."""
        if not array.size:
            return b""
        patches = _cut(array)
        words = patches.view(np.uint64)
        changed = np.ones(patches.shape[:-1], bool)
        np.any(words[1:] != words[:-1], axis=-1, out=changed[1:])
        sent = patches[changed].reshape(-1, EDGE * EDGE, _pixel_bytes(array.shape, array.dtype))
        flat = (sent == sent[:, :1]).all(axis=(1, 2))
        rest = sent[flat, 0].tobytes() + sent[~flat].tobytes()
        if self._level:
            rest = zlib.compress(rest, self._level)
        masks = np.packbits(changed).tobytes() + np.packbits(flat).tobytes()
        data: bytes = _HEAD.pack(bool(self._level), len(flat)) + masks + rest
        return data

    def decode(
        self, data: memoryview, shape: tuple[int, ...], dtype: "np.dtype[Any]"
    ) -> "np.ndarray[Any, Any]":
        """Both levels are read.

        Raises:
            ValueError: It is no encoding of an array of that shape and dtype.
        """
        if 0 in shape:
            return np.empty(shape, dtype)
        times, tall, wide, pixel = _geometry(shape, dtype)
        count = times * tall * wide
        try:
            packed, sent = _HEAD.unpack_from(data)
        except struct.error as error:
            raise ValueError(f"no patches: {error}") from None
        at = _HEAD.size
        changed, at = _bits(data, at, count)
        if sent != np.count_nonzero(changed) or (tall * wide and not changed[: tall * wide].all()):
            raise ValueError("patches that do not add up")
        flat, at = _bits(data, at, sent)
        flats = int(np.count_nonzero(flat))
        area = EDGE * EDGE * pixel
        size = flats * pixel + (sent - flats) * area
        rest = _inflated(data[at:], size) if packed else data[at:]
        if len(rest) != size:
            raise ValueError(f"patches of {len(rest)} bytes, not {size}")
        rows = np.empty((sent, EDGE * EDGE, pixel), np.uint8)
        pixels = np.frombuffer(rest, np.uint8)
        rows[flat] = pixels[: flats * pixel].reshape(flats, 1, pixel)
        rows[~flat] = pixels[flats * pixel :].reshape(-1, EDGE * EDGE, pixel)
        return _joined(rows, changed.reshape(times, -1), shape, dtype)


class PackedPatches(Patches):
    """`Patches` through zlib at its fastest: fewer bytes, several times slower."""

    def __init__(self) -> None:
        super().__init__(level=1)


def _geometry(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> tuple[int, int, int, int]:
    """Times, patches down (all images of a time), patches across, bytes a pixel."""
    height, width = _image(shape)
    times = shape[0] if len(shape) > 3 else 1
    images = int(np.prod(shape[1:-3], dtype=np.int64)) if len(shape) > 3 else 1
    tall, wide = -(-height // EDGE), -(-width // EDGE)
    return times, images * tall, wide, _pixel_bytes(shape, dtype)


def _image(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) >= 3:
        return shape[-3], shape[-2]
    return 1, int(np.prod(shape, dtype=np.int64))


def _pixel_bytes(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> int:
    return (shape[-1] if len(shape) >= 3 else 1) * dtype.itemsize


def _cut(array: "np.ndarray[Any, Any]") -> Bytes:
    """(times, patches, bytes of a patch), padded with zeros."""
    times, tall, wide, pixel = _geometry(array.shape, array.dtype)
    height, width = _image(array.shape)
    images = tall // -(-height // EDGE)
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    frames = flat.reshape(times * images, height, width, pixel)
    down, across = -height % EDGE, -width % EDGE
    if down or across:
        frames = np.pad(frames, ((0, 0), (0, down), (0, across), (0, 0)))
    cut = frames.reshape(times, tall, EDGE, wide, EDGE, pixel).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(cut).reshape(times, tall * wide, EDGE * EDGE * pixel)


def _joined(
    rows: Bytes, changed: "np.ndarray[Any, Any]", shape: tuple[int, ...], dtype: "np.dtype[Any]"
) -> "np.ndarray[Any, Any]":
    """The array, from the patches that were sent."""
    times, tall, wide, pixel = _geometry(shape, dtype)
    height, width = _image(shape)
    # The number of the last patch sent at each place, at each time.
    numbers = np.cumsum(changed.reshape(-1)).reshape(times, -1) - 1
    latest = np.maximum.accumulate(np.where(changed, numbers, 0), axis=0)
    cut = rows[latest.reshape(-1)].reshape(times, tall, wide, EDGE, EDGE, pixel)
    frames = cut.transpose(0, 1, 3, 2, 4, 5).reshape(
        -1, -(-height // EDGE) * EDGE, wide * EDGE, pixel
    )
    trimmed = np.ascontiguousarray(frames[:, :height, :width])
    return trimmed.reshape(-1).view(dtype).reshape(shape)


def _bits(data: memoryview, at: int, count: int) -> tuple["np.ndarray[Any, Any]", int]:
    size = -(-count // 8)
    if size > len(data) - at:
        raise ValueError("patches that end in the middle")
    packed = np.frombuffer(data[at : at + size], np.uint8)
    return np.unpackbits(packed, count=count).astype(bool), at + size


def _inflated(data: memoryview, size: int) -> bytes:
    """At most so many bytes."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, size) if size else b""
    except zlib.error as error:
        raise ValueError(f"patches that do not unpack: {error}") from None
    return found
