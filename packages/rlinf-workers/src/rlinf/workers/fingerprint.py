"""Fingerprints of tensors: equal for equal contents, different after any accident to a byte.

XXH3, not a cryptographic hash: it finds what breaks, not what an enemy makes. It reads memory as
fast as a copy does.
"""

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

__all__ = ["combined", "fingerprint", "marks_of"]


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Of the names, dtypes, shapes and bytes; the order of the names does not matter."""
    return combined(marks_of(state))


def marks_of(state: Mapping[str, Tensor]) -> dict[str, str]:
    """The fingerprint of each tensor: of its dtype, shape and bytes, 32 hexadecimal digits."""
    return {name: _mark(tensor) for name, tensor in state.items()}


def combined(marks: Mapping[str, str]) -> str:
    """The fingerprint of a state, from those of its tensors."""
    text = "".join(f"{name}={marks[name]};" for name in sorted(marks))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _mark(tensor: Tensor) -> str:
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
