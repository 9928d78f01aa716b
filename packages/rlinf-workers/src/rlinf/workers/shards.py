"""Tensors by name in files, whole or in slices, for any number of ranks to write and to read.

A file is in the safetensors format. A rank writes those parts of each tensor which it has; the
reader puts whole tensors together from all files, however many ranks wrote them, and raises where
a part is missing. So a checkpoint of four ranks can be loaded by one, or by three. Of ranks that
have the same part only one writes it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlinf.workers.errors import CheckpointTorn

__all__ = ["Shard", "as_shards", "assembled", "load_tensors", "save_tensors", "whole"]


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


def as_shards(tensors: Mapping[str, Tensor | Shard]) -> dict[str, Shard]:
    """Shards as they are, tensors as whole ones."""
    return {n: t if isinstance(t, Shard) else whole({n: t})[n] for n, t in tensors.items()}


def assembled(shards: Iterable[tuple[str, Shard]]) -> dict[str, Tensor]:
    """The whole tensors that named shards make; one that has its tensor in full is not copied.

    Raises `ValueError`: an element is missing, or there twice.
    """
    tensors: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, shard in shards:
        values = shard.values.detach()
        if name not in tensors:
            alone = tuple(values.shape) == shard.shape
            tensors[name] = values if alone else values.new_zeros(shard.shape)
            missing[name] = tensors[name].numel()
        target = tensors[name]
        if target is not values:
            for axis, (start, size) in enumerate(zip(shard.start, values.shape, strict=True)):
                target = target.narrow(axis, start, size)
            target.copy_(values)
        missing[name] -= values.numel()
    for name, count in missing.items():
        if count:
            how = "are missing" if count > 0 else "are there twice"
            total = tensors[name].numel()
            raise ValueError(f"{name}: {abs(count)} of its {total} elements {how}")
    return tensors


def save_tensors(path: Path, shards: Mapping[str, Shard]) -> None:
    """Write a rank's shards; `rlinf.workers.checkpoint.seal` brings them to the disk."""
    boxes = {name: {"shape": s.shape, "start": s.start} for name, s in shards.items()}
    values = {name: s.values.detach().cpu().contiguous() for name, s in shards.items()}
    save_file(values, path, metadata={"boxes": json.dumps(boxes)})


def load_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The whole tensors, on the CPU. Raises `CheckpointTorn`: unreadable, or a part is missing."""
    try:
        return assembled(shard for path in paths for shard in _read(path))
    except ValueError as error:
        raise CheckpointTorn(str(error)) from error


def _read(path: Path) -> Iterator[tuple[str, Shard]]:
    try:
        with safe_open(path, "pt") as file:
            for name, box in json.loads((file.metadata() or {})["boxes"]).items():
                values = file.get_tensor(name)
                yield name, Shard(values, tuple(box["shape"]), tuple(box["start"]))
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointTorn(f"{path} cannot be read: {error}") from error
