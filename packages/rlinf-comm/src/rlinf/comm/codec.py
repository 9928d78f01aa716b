"""Any Python object to a header and raw buffers, and back: `join(*split(obj))`.

What travels how
    None, bool, int of any size, float, complex, str, bytes, list, tuple, named tuple, dict,
    OrderedDict, set, frozenset, dataclass, enum: by value, in the header; long strings and bytes
    in buffers. Keys, field names and dtypes are the header's structure, apart from the values.
    numpy arrays and scalars of every dtype, torch tensors and Parameters, memoryviews, and arrays
    that numpy can look into (jax, cupy, TensorFlow's eager tensors, the array API, DLPack):
    elements in a buffer, in C order; layout (strides, Fortran order, memory format) is normalised.
    A view is sent as its elements only.
    Coded: in the form that its codec gives it; arrives as an array.
    Parcel: closed.
    Everything else: cloudpickle, with arrays and protocol 5 buffers lifted out of it;
    `allow_pickle=False` refuses it by path.

Memory
    `split` copies nothing that lies in C order: the buffers are views on the object, which must
    not change before they have been written out. `join` copies nothing either: arrays are views
    on the buffers it was given, and keep them alive.

    numpy arrays are as writable as the buffer is. torch tensors have no read-only flag and would
    take the process down when written to, so one over a read-only buffer gets a private copy: a
    transport that wants tensors without a copy hands over writable memory (private to this
    process, such as a bytearray or a MAP_PRIVATE mapping). Buffers should be aligned to 16 bytes.

Sharing
    An object met twice in a message is one object on the other side, containers too. An array
    whose memory lies wholly and in one piece within another's (of the same library) is sent as a
    window into it, and shares its memory again on the other side. Arrays that overlap in part, or
    with gaps, arrive apart. Objects that contain themselves are pickled as a whole.

Tensors
    `requires_grad` is kept for leaves (Parameters stay Parameters); the result of a computation
    arrives detached. Subclasses, sparse and quantized tensors are pickled.

Malformed input
    `join` raises CodecError. Time and memory it takes grow with the size of the message.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from rlinf.comm.encoding import array_readers, lone, readers  # noqa: F401 - fill COMPILERS
from rlinf.comm.encoding.arrays import bytes_of
from rlinf.comm.encoding.coded import Coded
from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.encoding.parcel import Parcel
from rlinf.comm.encoding.template import Malformed, Values, compile_structure
from rlinf.comm.encoding.writer import write
from rlinf.comm.errors import CodecError
from rlinf.comm.proto.message_pb2 import Header

__all__ = ["Coded", "Packed", "Parcel", "join", "split"]

Buffer = bytes | bytearray | memoryview


class Packed(NamedTuple):
    """An encoded object.

    Attributes:
        header: A protobuf `Header`.
        buffers: One-dimensional memoryviews of bytes, views on the object where possible.
    """

    header: bytes
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of header and buffers together."""
        return len(self.header) + sum([buffer.nbytes for buffer in self.buffers])


def split(
    value: object, *, allow_pickle: bool = True, kinds: frozenset[str] = frozenset()
) -> Packed:
    """Encode an object. The buffers are views on it: write them out before it changes.

    Tensors on these `kinds` of device give an `OnDevice` in the place of a buffer.

    Raises:
        CodecError: It cannot be encoded; `path` says where in the object the obstacle is.
    """
    if lone.is_lone(value) and (known := lone.header_of(value)) is not None:
        return Packed(known, (bytes_of(value),))
    header, buffers = write(value, allow_pickle, kinds)
    if lone.is_lone(value):
        lone.learn(value, header)
    return Packed(header, tuple(buffers))


def join(header: bytes, buffers: Sequence[Buffer] = (), *, allow_pickle: bool = True) -> Any:
    """Decode an object. Its arrays are views on the buffers; see the module's text on memory.

    Raises:
        CodecError: The message is malformed, needs a class or library that is not here, or holds a
            pickled object and `allow_pickle` is off.
    """
    array = lone.array_of(header, buffers)
    if array is not None:
        return array
    try:
        message = Header.FromString(header)
    except (DecodeError, TypeError) as error:
        raise CodecError(f"malformed message: no header: {error}") from None
    read = compile_structure(message.structure, allow_pickle)
    values = Values(message, _views(buffers))
    try:
        value = read(values)
        values.finish()
    except StopIteration:
        raise CodecError("malformed message: fewer values than the structure has places") from None
    except (
        Malformed, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError
    ) as error:  # fmt: skip
        raise CodecError(f"malformed message: {error}") from error
    if lone.is_lone(value):
        split(value)  # the next one like it is known by its header
    return value


def _views(buffers: Iterable[Buffer]) -> list[memoryview]:
    return [
        buffer
        if isinstance(buffer, OnDevice)
        or (type(buffer) is memoryview and buffer.format == "B" and buffer.ndim == 1)
        else memoryview(buffer).cast("B")
        for buffer in buffers
    ]
