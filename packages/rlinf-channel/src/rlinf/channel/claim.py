"""Claims: what travels in the place of an item that stays on its producer's accelerator."""

import struct
from typing import NamedTuple

from rlinf.channel.cargo import ALIGN, CLAIM, Bytes, Cargo

_HEAD = struct.Struct("<QIQI")


class Claim(NamedTuple):
    """Who has the item, which of its channel objects put it, and its number there."""

    worker: str
    epoch: int
    client: int
    number: int

    def cargo(self, nbytes: int) -> Cargo:
        """The claim as what a channel carries; it counts as many bytes as the item itself."""
        worker = self.worker.encode()
        piece = _HEAD.pack(self.epoch, self.client, self.number, len(worker)) + worker
        return CLAIM, nbytes, piece + bytes(-len(piece) % ALIGN)


def read_claim(piece: Bytes) -> Claim:
    """The claim in a piece.

    Raises:
        ValueError: It is malformed.
    """
    try:
        epoch, client, number, length = _HEAD.unpack_from(piece)
        worker = bytes(piece[_HEAD.size : _HEAD.size + length]).decode()
    except struct.error as error:
        raise ValueError(f"malformed claim: {error}") from None
    return Claim(worker, epoch, client, number)
