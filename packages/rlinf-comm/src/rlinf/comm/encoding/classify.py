"""Which encoder a type gets: the one place that knows them all."""

import enum
from collections import OrderedDict
from typing import Final

import numpy as np

from rlinf.comm.encoding import arrays, classes, coded, parcel, pickles, plain, tensors
from rlinf.comm.encoding.walk import ENCODERS, Encoder

KNOWN: Final[dict[type, Encoder]] = {
    type(None): plain.encode_none,
    bool: plain.encode_bool,
    int: plain.encode_int,
    float: plain.encode_float,
    complex: plain.encode_complex,
    str: plain.encode_str,
    bytes: plain.encode_bytes,
    bytearray: plain.encode_bytearray,
    memoryview: plain.encode_memoryview,
    list: plain.encode_list,
    tuple: plain.encode_tuple,
    dict: plain.encode_dict,
    OrderedDict: plain.encode_ordered_dict,
    set: plain.encode_set,
    frozenset: plain.encode_frozenset,
    np.ndarray: arrays.encode_array,
    np.memmap: arrays.encode_array,
    coded.Coded: coded.encode_coded,
    parcel.Parcel: parcel.encode_parcel,
}


def classify(kind: type) -> Encoder:
    """The encoder of a type that is not in `KNOWN`; asked once for every type."""
    if kind.__module__ in _TORCH and kind.__name__ in _TORCH[kind.__module__]:
        return tensors.encode_tensor
    if issubclass(kind, np.generic) and kind is not np.record:
        return arrays.encode_scalar
    if issubclass(kind, enum.Enum):
        return classes.encode_member
    if classes.is_named_tuple(kind):
        return classes.encode_named
    if classes.is_plain_dataclass(kind):
        return classes.encode_record(kind)
    if not issubclass(kind, np.ndarray) and arrays.namespace_of(kind) is not None:
        return arrays.encode_foreign
    return pickles.encode_pickled


_TORCH: Final = {
    "torch": frozenset({"Tensor"}),
    "torch.nn.parameter": frozenset({"Parameter"}),
}

ENCODERS.known = KNOWN
ENCODERS.classify = classify
ENCODERS.update(KNOWN)
pickles.LIFTED.update(
    (arrays.encode_array, arrays.encode_foreign, tensors.encode_tensor, parcel.encode_parcel)
)
