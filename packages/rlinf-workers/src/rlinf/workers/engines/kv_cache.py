"""Keys and values of the sequences being decoded: one static block, rows of any length."""

import torch
from torch import Tensor

from rlinf.workers.engines.attention import length_bias, padded_width

__all__ = ["KvCache"]

GROWTH = 64


class KvCache:
    """Keys and values [layers, rows, heads, width, depth], and how much of each row is filled.

    The rows are independent: row b holds `lengths[b]` positions, from 0 on. Memory grows by
    `GROWTH` positions at a time. Methods that return a cache leave this one unusable.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.lengths = lengths
        self._all = torch.arange(len(lengths), device=lengths.device)
        self.longest = 0
        self.even = False
        """Whether all rows are equally long: then a position of all of them is a slice."""
        self._count(lengths)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes held, filled or not."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put one position a row, [rows, heads, depth], at the end of each row of `layer`.

        Returns the keys and values of all rows [rows, heads, width, depth], with finite numbers
        behind the end of each. `advance` makes the new position count.
        """
        if self.even:
            self.keys[layer, :, :, self.longest] = keys
            self.values[layer, :, :, self.longest] = values
        else:
            self.keys[layer][self._all, :, self.lengths] = keys
            self.values[layer][self._all, :, self.lengths] = values
        width = padded_width(self.longest + 1, self.keys.shape[4])
        return self.keys[layer, :, :, :width], self.values[layer, :, :, :width]

    def reserve(self) -> Tensor:
        """Make room for one more position in every row.

        Returns the bias [rows or 1, 1, width] which hides what `write` returns beyond it.
        """
        width = padded_width(self.longest + 1, self.keys.shape[4])
        if width > self.keys.shape[3]:
            self.keys = _widened(self.keys, width + GROWTH)
            self.values = _widened(self.values, width + GROWTH)
        return length_bias((self.lengths[:1] if self.even else self.lengths) + 1, width)

    def advance(self, going: Tensor | None = None) -> None:
        """Count the positions that were written to every layer, of the rows `going` (bool) only.

        In the other rows the next position is written in the same place again.
        """
        if going is None:
            self.lengths = self.lengths + 1
            self.longest += 1
        else:
            self._count(self.lengths + going)

    def widen(self, rows: Tensor, counts: Tensor) -> int:
        """Make room for `counts` more positions in `rows`; how many keys their attention reads."""
        width = padded_width(int((self.lengths[rows] + counts).max()), self.keys.shape[4])
        if width > self.keys.shape[3]:
            self.keys = _widened(self.keys, width + GROWTH)
            self.values = _widened(self.values, width + GROWTH)
        return width

    def put(
        self, layer: int, places: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write [N, heads, depth] at `places`, (row, position) of each; the whole of `layer`."""
        rows, positions = places
        self.keys[layer][rows, :, positions] = keys
        self.values[layer][rows, :, positions] = values
        return self.keys[layer], self.values[layer]

    def extended(self, rows: Tensor, counts: Tensor) -> None:
        """Count `counts` more positions in `rows`, which `put` has written to every layer."""
        self._count(self.lengths.index_copy(0, rows, self.lengths[rows] + counts))

    def _count(self, lengths: Tensor) -> None:
        self.lengths = lengths
        longest, shortest = (int(x) for x in (lengths.max(), lengths.min()))
        self.longest, self.even = longest, longest == shortest

    def select(self, rows: Tensor, steps: int) -> "KvCache":
        """The cache of these rows, in this order; a row may be taken many times.

        Makes room for `steps` more positions, or for `GROWTH` of them.
        """
        lengths = self.lengths[rows]
        width = int(lengths.max())
        room = padded_width(width + min(steps, GROWTH), self.keys.shape[4])
        blocks: list[Tensor] = []
        for block in (self.keys, self.values):
            layers, _, heads, _, depth = block.shape
            taken = block.new_empty(layers, len(rows), heads, room, depth)
            taken[:, :, :, :width] = block[:, :, :, :width].index_select(1, rows)
            taken[:, :, :, width:] = 0
            blocks.append(taken)
        return KvCache(blocks[0], blocks[1], lengths)

    def join(self, other: "KvCache") -> "KvCache":
        """The rows of this cache, then those of `other`."""
        width = max(self.keys.shape[3], other.keys.shape[3])
        return KvCache(
            torch.cat([_widened(self.keys, width), _widened(other.keys, width)], 1),
            torch.cat([_widened(self.values, width), _widened(other.values, width)], 1),
            torch.cat([self.lengths, other.lengths]),
        )


def _widened(block: Tensor, width: int) -> Tensor:
    """`block` [layers, rows, heads, width, depth] with more room, zeros in it.

    Zeros and not garbage: a masked position has the weight 0, but 0 times NaN is NaN.
    """
    layers, rows, heads, old, depth = block.shape
    if old == width:
        return block
    wide = block.new_zeros(layers, rows, heads, width, depth)
    wide[:, :, :, :old] = block
    return wide
