"""numpy arrays and scalars, and arrays of other libraries that numpy can look into."""

import functools
import importlib
import json
import re
import sys
from typing import Any, Final

import numpy as np

from rlinf.comm.encoding.plain import encode_items
from rlinf.comm.encoding.structure import DTYPES, NAMED_DTYPE, Op
from rlinf.comm.encoding.walk import Refused, Walk

NOTHING: Final = memoryview(b"")
MAX_DTYPE_CHARS: Final = 1 << 16
_DTYPE: Final = re.compile(r"[<>|=][?bBiufcmMUSV][0-9]{0,9}(\[[0-9]*[a-zA-Z]+\])?")

_NUMPY_DTYPES: Final = {
    number: np.dtype(name) for number, name in enumerate(DTYPES) if hasattr(np, name)
}
_NUMBERS: Final = {dtype: number for number, dtype in _NUMPY_DTYPES.items()}


def encode_array(walk: Walk, value: "np.ndarray[Any, Any]", depth: int) -> None:
    """A numpy array: its elements in C order, whatever the layout was."""
    memo, key = walk.memo, id(value)
    number = memo.get(key)
    if number is not None:
        walk.program += (Op.REF, number)
        return
    if value.dtype.hasobject:
        _encode_objects(walk, value, depth)
        return
    if walk.windows is not None and share(walk, key):
        write_array(walk, value)
    else:
        write_array(walk, value)
        walk.buffers.append(bytes_of(value))
        if value.base is not None:
            walk.views.append(id(value.base))
    walk.arrays.append(value)
    memo[key] = walk.done
    walk.done += 1


def share(walk: Walk, key: int) -> bool:
    """On the second pass: write where the array's memory lies in another's; False: its own."""
    windows = walk.windows
    assert windows is not None
    owner = windows.owner.get(key)
    if owner is None:
        windows.buffers[key] = len(walk.buffers)
        return False
    windows.patches.append((len(walk.numbers), owner))
    walk.program.append(Op.WINDOW)
    walk.numbers += (0, windows.offset[key])
    return True


def is_numbered(dtype: "np.dtype[Any]") -> bool:
    """Whether a dtype is said by number, not by name."""
    return dtype in _NUMBERS


def write_array(walk: Walk, value: "np.ndarray[Any, Any]") -> None:
    """The operation and the shape, without the buffer."""
    number = _NUMBERS.get(value.dtype)
    if number is None:
        number = NAMED_DTYPE + walk.name(name_of(value))
    walk.program += (Op.ARRAY, number, value.ndim)
    walk.numbers += value.shape


def bytes_of(value: "np.ndarray[Any, Any]") -> memoryview:
    """The elements as bytes in C order: a view where the layout allows, else a packed copy."""
    try:
        return value.data.cast("B")
    except (TypeError, ValueError, BufferError):
        # Not in C order, empty, or of a dtype that memoryview does not know.
        if value.nbytes == 0:
            return NOTHING
        if not value.flags.c_contiguous:
            value = value.copy(order="C")
        return value.reshape(-1).view(np.uint8).data


def address_of(value: Any) -> tuple[int, int] | None:
    """Address and size of an array's or tensor's memory; None where it is not in one piece."""
    if isinstance(value, np.ndarray):
        if value.nbytes == 0 or not value.flags.c_contiguous:
            return None
        return value.__array_interface__["data"][0], value.nbytes
    if not value.is_cpu or value.numel() == 0 or not value.is_contiguous():
        return None
    if value.is_conj() or value.is_neg():
        return None
    return value.data_ptr(), value.nbytes


def _encode_objects(walk: Walk, value: "np.ndarray[Any, Any]", depth: int) -> None:
    if type(value.dtype).__name__ == "StringDType":
        raise Refused(value, "numpy's variable-width strings cannot be sent; use .astype('U')")
    if value.dtype != object:
        raise Refused(value, f"numpy dtype {value.dtype} holds objects inside a structure")
    if walk.enter(value, depth):
        items = value.ravel().tolist()
        walk.keep.append(items)
        walk.program += (Op.OBJECTS, value.ndim)
        walk.numbers += value.shape
        encode_items(walk, items, depth)
        walk.leave(value)


def encode_scalar(walk: Walk, value: "np.generic[Any]", depth: int) -> None:
    """A numpy scalar keeps its type."""
    number = _NUMBERS.get(value.dtype)
    if number is None:
        number = NAMED_DTYPE + walk.name(name_of(value))
    walk.program += (Op.SCALAR, number)
    walk.blobs.append(value.tobytes())


# -- dtypes ----------------------------------------------------------------------------------------


def name_of(value: Any) -> str:
    """The name of a numpy dtype that has no number: its layout as JSON, see `dtype_named`."""
    return json.dumps(_layout(value.dtype, value), separators=(",", ":"))


def _layout(dtype: "np.dtype[Any]", value: object) -> object:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _layout(base, value), "shape": shape}
    if dtype.isbuiltin == 2:
        module = dtype.type.__module__
        if module.partition(".")[0] != "ml_dtypes":
            raise Refused(value, f"dtype {dtype} of {module} is not known; send another dtype")
        return f"ml_dtypes:{dtype.name}"
    if dtype.fields is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names or ()]
    return {
        "names": dtype.names,
        "formats": [_layout(field[0], value) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [_title(field, value) for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def _title(field: tuple[Any, ...], value: object) -> str | None:
    title = field[2] if len(field) > 2 else None
    if title is not None and type(title) is not str:
        raise Refused(value, f"a dtype with the title {title!r}, which is no string")
    return title


def dtype_number(number: int, names: tuple[str, ...]) -> "np.dtype[Any]":
    """The numpy dtype of a number in a program.

    Raises:
        ValueError: There is none, or numpy has no such dtype.
    """
    if number >= NAMED_DTYPE:
        return dtype_named(names[number - NAMED_DTYPE])
    known = _NUMPY_DTYPES.get(number)
    return _extension(DTYPES[number]) if known is None else known


@functools.lru_cache(maxsize=256)
def dtype_named(name: str) -> "np.dtype[Any]":
    """Read what `name_of` wrote.

    Raises:
        ValueError: It is no layout, or an extension of numpy is not installed here.
    """
    if len(name) > MAX_DTYPE_CHARS:
        raise ValueError(f"a dtype described in {len(name)} characters")
    try:
        dtype = _built(json.loads(name))
    except (TypeError, LookupError, AttributeError, SyntaxError, RecursionError) as error:
        raise ValueError(f"no numpy dtype: {error}") from None
    if dtype.hasobject:
        raise ValueError("a dtype that holds objects")
    return dtype


def _built(layout: Any) -> "np.dtype[Any]":
    if isinstance(layout, str):
        if layout.startswith("ml_dtypes:"):
            return _extension(layout.removeprefix("ml_dtypes:"))
        if not _DTYPE.fullmatch(layout):
            raise ValueError(f"no numpy dtype: {layout[:64]!r}")
        return np.dtype(layout)
    if "base" in layout:
        return np.dtype((_built(layout["base"]), tuple(layout["shape"])))
    return np.dtype(
        {
            "names": layout["names"],
            "formats": [_built(field) for field in layout["formats"]],
            "offsets": layout["offsets"],
            "titles": layout["titles"],
            "itemsize": layout["itemsize"],
        },
        align=bool(layout["aligned"]),
    )


def _extension(name: str) -> "np.dtype[Any]":
    try:
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"numpy dtype {name} needs the package ml_dtypes: {error}") from None
    return found


# -- arrays of other libraries ---------------------------------------------------------------------


def namespace_of(kind: type) -> str | None:
    """The array module of a type by duck typing (jax, cupy, ...); None: it is no array type."""
    top = kind.__module__.partition(".")[0]
    if top == "tensorflow" and kind.__name__ == "EagerTensor":
        return "tensorflow"
    if top in ("jax", "jaxlib") and "Array" in kind.__name__:
        return "jax.numpy"
    if top == "cupy" and kind.__name__ == "ndarray":
        return "cupy"
    if hasattr(kind, "__array_namespace__") and hasattr(kind, "__dlpack__"):
        return ""
    return None


def encode_foreign(walk: Walk, value: Any, depth: int) -> None:
    """An array of another library: through numpy, by way of the host."""
    if walk.enter(value, depth):
        module = namespace_of(type(value)) or value.__array_namespace__().__name__
        host = _to_numpy(value, module)
        walk.keep.append(host)
        walk.program += (Op.FOREIGN, walk.name(module))
        write_array(walk, host)
        walk.buffers.append(bytes_of(host))
        walk.leave(value)


def _to_numpy(value: Any, module: str) -> "np.ndarray[Any, Any]":
    """The elements on the host: by the buffer protocol or `__array__`, else by DLPack."""
    try:
        host = np.asarray(value.get() if module == "cupy" else value)
        if host.dtype.hasobject and module != "tensorflow":  # its DLPack aborts on strings
            host = np.from_dlpack(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise Refused(value, str(error)) from error
    if host.dtype.hasobject:
        raise Refused(value, f"{type(value)} gives numpy an array of objects")
    return host


def namespace(module: str, allow_import: bool) -> Any:
    """What makes an array of a received array's module from one of numpy.

    Raises:
        ValueError: It is not there, or is no array module.
    """
    found = sys.modules.get(module)
    if found is None and (allow_import or module in ("jax.numpy", "cupy", "tensorflow")):
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"an array of {module} arrived: {error}") from None
    make = getattr(found, "convert_to_tensor" if module == "tensorflow" else "asarray", None)
    if not callable(make):
        raise ValueError(f"an array of {module} arrived, which is no array module here; import it")
    return make
