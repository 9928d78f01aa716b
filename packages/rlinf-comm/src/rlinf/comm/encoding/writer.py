"""From an object to a header and buffers."""

from typing import Any, Final

from rlinf.comm.encoding import classify  # noqa: F401 - fills ENCODERS
from rlinf.comm.encoding.arrays import address_of
from rlinf.comm.encoding.classes import describe
from rlinf.comm.encoding.path import path_to
from rlinf.comm.encoding.pickles import encode_pickled
from rlinf.comm.encoding.structure import MAX_DEPTH
from rlinf.comm.encoding.walk import ENCODERS, Refused, TooDeep, Walk, Windows
from rlinf.comm.errors import CodecError
from rlinf.comm.proto.message_pb2 import Header, Keys, Structure

HEADER_BYTES: Final = (1 << 31) - 1
"""The largest protobuf message."""

STRUCTURES: Final = 1024
"""How many serialised structures are kept, so that a message like an earlier one finds its own."""

_structures: dict[tuple[object, ...], bytes] = {}


def write(
    value: object, allow_pickle: bool, kinds: frozenset[str] = frozenset()
) -> tuple[bytes, list[memoryview]]:
    """The header and the buffers of an object.

    Raises:
        CodecError: It cannot be encoded.
    """
    try:
        return _write(value, allow_pickle, kinds, careful=False)
    except UnicodeEncodeError:
        return _write(value, allow_pickle, kinds, careful=True)


def _write(
    value: object, allow_pickle: bool, kinds: frozenset[str], *, careful: bool
) -> tuple[bytes, list[memoryview]]:
    try:
        try:
            walk = Walk(allow_pickle, careful, None, kinds)
            ENCODERS[type(value)](walk, value, 0)
            if may_share(walk) and (windows := find_windows(walk.arrays)) is not None:
                walk = _share(value, walk, windows)
        except TooDeep:
            if not allow_pickle:
                raise CodecError(
                    f"cannot encode $: it contains itself or is nested deeper than {MAX_DEPTH} "
                    "levels, which needs pickling, which is off",
                    path="$",
                ) from None
            walk = Walk(allow_pickle, careful, None, kinds)
            encode_pickled(walk, value, 0)
        return header_of(walk), walk.buffers
    except Refused as refusal:
        path = path_to(value, refusal.leaf)
        raise CodecError(f"cannot encode {path}: {refusal.why}", path=path) from refusal.__cause__


def _share(value: object, first: Walk, windows: Windows) -> Walk:
    """Walk again with the windows found; `first` is kept until then, so that ids stay unique."""
    second = Walk(first.allow_pickle, first.careful, windows, first.kinds)
    ENCODERS[type(value)](second, value, 0)
    if any(owner not in windows.buffers for _, owner in windows.patches):
        return first  # a pickled object made its arrays anew
    for position, owner in windows.patches:
        second.numbers[position] = windows.buffers[owner]
    return second


def header_of(walk: Walk) -> bytes:
    """Serialise what a walk has collected."""
    header = Header()
    header.structure = structure_of(walk)
    # An empty list is not even touched: that is most of the cost of a small message.
    if walk.numbers:
        header.numbers.extend(walk.numbers)
    if walk.reals:
        header.reals.extend(walk.reals)
    if walk.texts:
        header.texts.extend(walk.texts)
    if walk.blobs:
        header.blobs.extend(walk.blobs)
    data = header.SerializeToString()
    check_size(len(data))
    return data


def check_size(size: int) -> None:
    """Check the size of a header in bytes.

    Raises:
        CodecError: It is more than protobuf reads.
    """
    if size > HEADER_BYTES:
        raise CodecError(
            f"what does not go in buffers makes {size} bytes, and {HEADER_BYTES} is the most: send "
            "many strings or objects in an array, or in several messages"
        )


def structure_of(walk: Walk) -> bytes:
    """The serialised structure of a walk, from the cache if one like it was there before."""
    key = (
        walk.allow_pickle,
        tuple(walk.program),
        tuple(walk.keys),
        tuple(walk.classes),
        tuple(walk.names),
    )
    structure = _structures.get(key)
    if structure is None:
        message = Structure(program=walk.program, names=walk.names)
        message.classes.extend(describe(kind, walk.allow_pickle) for kind in walk.classes)
        message.keys.extend(Keys(keys=keys) for keys in walk.keys)
        structure = message.SerializeToString()
        if len(_structures) >= STRUCTURES:
            _structures.clear()
        _structures[key] = structure
    return structure


def may_share(walk: Walk) -> bool:
    """Whether arrays of the object may lie in each other's memory; cheap, errs on this side."""
    views, spans = walk.views, walk.spans
    if views:
        bases = set(views)
        if len(bases) < len(views) or not bases.isdisjoint(walk.memo):
            return True
    if len(spans) > 1:
        end = 0
        for start, size in sorted(spans):
            if start < end:
                return True
            end = start + size
    return False


def find_windows(arrays: list[Any]) -> Windows | None:
    """Which arrays lie wholly in the memory of another one, which is then sent once.

    Arrays that overlap in part, or whose elements do not lie one after another, are sent apart.
    numpy and torch are looked at separately; of equals the first is the owner.
    """
    found = Windows()
    spans: list[tuple[bool, int, int, int, int]] = []
    for order, array in enumerate(arrays):
        span = address_of(array)
        if span is not None:
            spans.append((hasattr(array, "data_ptr"), span[0], -span[1], order, id(array)))
    kind, start, end, owner = False, 0, 0, 0
    for torch, address, size, _, key in sorted(spans):
        if torch is kind and owner and address - size <= end:
            found.owner[key] = owner
            found.offset[key] = address - start
        elif torch is not kind or address - size > end:
            kind, start, end, owner = torch, address, address - size, key
    return found if found.owner else None
