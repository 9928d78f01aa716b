"""Into: a received object put into memory that is there already."""

from typing import Any

import numpy as np

from rlinf.comm.address import WorkerId
from rlinf.comm.errors import MessageMismatch


def fill(out: Any, value: object, source: WorkerId) -> Any:
    """Copy `value` into `out`, which has the same structure; returns `out`.

    Args:
        out: numpy arrays or torch tensors, alone or in dicts, lists and tuples.
        value: What was received.
        source: From whom, for the message.

    Raises:
        MessageMismatch: Structure, library, dtype or shape differ; nothing has been copied then.
        TypeError: `out` holds something else than arrays.
    """
    pairs: list[tuple[Any, Any]] = []
    _match(out, value, source, "$", pairs)
    for array, received in pairs:
        if isinstance(array, np.ndarray):
            np.copyto(array, received)
        else:
            array.detach().copy_(received.detach())
    return out


def _match(out: Any, value: Any, source: WorkerId, path: str, pairs: list[tuple[Any, Any]]) -> None:
    if isinstance(out, dict):
        if not isinstance(value, dict) or out.keys() != value.keys():
            raise _mismatch(source, path, f"a dict with the keys {list(out)}", _said(value))
        for key, inner in out.items():
            _match(inner, value[key], source, f"{path}[{key!r}]", pairs)
    elif isinstance(out, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(out) != len(value):
            raise _mismatch(source, path, f"{len(out)} items", _said(value))
        for index, inner in enumerate(out):
            _match(inner, value[index], source, f"{path}[{index}]", pairs)
    elif isinstance(out, np.ndarray) or hasattr(out, "copy_"):
        wanted, got = _said(out), _said(value)
        if wanted != got:
            raise _mismatch(source, path, wanted, got)
        pairs.append((out, value))
    else:
        raise TypeError(f"out{path[1:]} is a {type(out).__name__}, which cannot be received into")


def _said(value: Any) -> str:
    """Library, dtype and shape of an array in words; what else an object is."""
    if isinstance(value, dict):
        return f"a dict with the keys {list(value)}"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} items"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = "numpy array" if isinstance(value, np.ndarray) else "tensor"
        return f"a {kind} of {value.dtype} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _mismatch(source: WorkerId, path: str, wanted: str, got: str) -> MessageMismatch:
    return MessageMismatch(
        f"out{path[1:]} is {wanted}, and {source} sent {got}: let both sides agree, or receive "
        "without out=",
        peer=source,
    )
