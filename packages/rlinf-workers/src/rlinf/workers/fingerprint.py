"""Fingerprints of tensors: equal for equal contents, different after any accident to a byte.

Not a cryptographic hash: it finds what breaks, not what an enemy makes. It reads memory at a few
gigabytes a second, several times as fast as those do.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["combined", "fingerprint", "marks_of"]

LANES = 4096
_BLOCK_BYTES = 8 * LANES
_MULTIPLIER = np.uint64(0xD1342543DE82EF95)
_SHIFT = np.uint64(32)


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Of the names, dtypes, shapes and bytes; the order of the names does not matter."""
    return combined(marks_of(state))


def marks_of(state: Mapping[str, Tensor]) -> dict[str, str]:
    """The fingerprint of each tensor: of its dtype, shape and bytes, 32 hexadecimal digits."""
    return {name: _mark(tensor) for name, tensor in state.items()}


def combined(marks: Mapping[str, str]) -> str:
    """The fingerprint of a state, from those of its tensors."""
    text = "".join(f"{name}={marks[name]};" for name in sorted(marks))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _mark(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    whole = len(flat) - len(flat) % _BLOCK_BYTES
    if whole:
        digest.update(_folded(flat[:whole].view(np.uint64).reshape(-1, LANES)).tobytes())
    digest.update(flat[whole:].tobytes())
    return digest.hexdigest()


def _folded(blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Fold [n, LANES] into [LANES]; every step is a bijection of what came before and of the block.

    So a change of one word is never lost, and the shift and the product carry it into all bits of
    its lane, so that changes in several blocks do not cancel as plain sums of floats' bits would.
    """
    lanes = np.full(LANES, _MULTIPLIER)
    spare = np.empty_like(lanes)
    for block in blocks:
        np.right_shift(lanes, _SHIFT, out=spare)
        np.bitwise_xor(lanes, spare, out=lanes)
        np.multiply(lanes, _MULTIPLIER, out=lanes)
        np.bitwise_xor(lanes, block, out=lanes)
    return lanes
