"""Tensors by name in files, whole or in slices, for any number of ranks to write and to read.

A file is in the safetensors format. A rank writes those parts of each tensor which it has; the
reader puts whole tensors together from all files, however many ranks wrote them, and raises where
a part is missing. So a checkpoint of four ranks can be loaded by one, or by three. Of ranks that
have the same part only one writes it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlinf.workers.errors import CheckpointTorn

__all__ = ["Shard", "load_tensors", "save_tensors", "whole"]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A box cut out of a tensor.

    Attributes:
        values: The elements of the box.
        shape: Of the whole tensor.
        start: Where the box begins in it, one index a dimension.
    """

    values: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Tensors that one rank has in full."""
    return {n: Shard(t, tuple(t.shape), (0,) * t.dim()) for n, t in tensors.items()}


def save_tensors(path: Path, shards: Mapping[str, Shard]) -> None:
    """Write a rank's shards; `rlinf.workers.checkpoint.seal` brings them to the disk."""
    boxes = {name: {"shape": s.shape, "start": s.start} for name, s in shards.items()}
    values = {name: s.values.detach().cpu().contiguous() for name, s in shards.items()}
    save_file(values, path, metadata={"boxes": json.dumps(boxes)})


def load_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The whole tensors, on the CPU. Raises `CheckpointTorn`: unreadable, or a part is missing."""
    tensors: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for path in paths:
        try:
            _read(path, tensors, missing)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointTorn(f"{path} cannot be read: {error}") from error
    for name, count in missing.items():
        if count:
            how = "are in no file" if count > 0 else "are in more than one file"
            text = f"{name}: {abs(count)} of its {tensors[name].numel()} elements {how}"
            raise CheckpointTorn(text)
    return tensors


def _read(path: Path, tensors: dict[str, Tensor], missing: dict[str, int]) -> None:
    with safe_open(path, "pt") as file:
        for name, box in json.loads((file.metadata() or {})["boxes"]).items():
            values = file.get_tensor(name)
            if name not in tensors:
                tensors[name] = torch.zeros(box["shape"], dtype=values.dtype)
                missing[name] = tensors[name].numel()
            target = tensors[name]
            for axis, (start, size) in enumerate(zip(box["start"], values.shape, strict=True)):
                target = target.narrow(axis, start, size)
            target.copy_(values)
            missing[name] -= values.numel()
