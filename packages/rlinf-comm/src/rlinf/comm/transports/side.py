"""Side: a second Unix socket beside a connection, over which descriptors are passed.

The side that dials passes the other one its end, with the first bytes it sends. After that nothing
but bytes comes over the connection, and a plain `recv` reads it.
"""

import os
import socket
import struct

from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import PREFIX, SIDE

_FD = struct.Struct("i")
_ANCILLARY = socket.CMSG_SPACE(_FD.size) if hasattr(socket, "CMSG_SPACE") else 0
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
DONTWAIT = socket.MSG_DONTWAIT


class Side:
    """One end. Not blocking, and not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def open(cls, connection: socket.socket) -> "Side":
        """Make both ends and send the peer its own."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            first = PREFIX.pack(SIDE, *(0,) * 8)
            socket.send_fds(connection, [first], [theirs.fileno()], DONTWAIT)
        return cls(mine)

    @classmethod
    def receive(
        cls, connection: socket.socket, room: memoryview, flags: int
    ) -> "tuple[int, Side | None]":
        """Read from the connection: how many bytes came, and this end if it came with them."""
        count, fd = _receive(connection, room, flags)
        return count, None if fd is None else cls(socket.socket(fileno=fd))

    def put(self, fd: int) -> None:
        """Pass a descriptor. Raises `BlockingIOError` where too many are under way."""
        socket.send_fds(self._socket, [b"\0"], [fd], DONTWAIT)

    def get(self) -> int:
        """The next descriptor that the peer has passed.

        Raises:
            ProtocolError: It has not.
        """
        try:
            _, fd = _receive(self._socket, memoryview(bytearray(1)), DONTWAIT)
        except OSError:
            fd = None
        if fd is None:
            raise ProtocolError("a segment without its descriptor")
        return fd

    def close(self) -> None:
        """Nothing more is passed."""
        self._socket.close()


def _receive(sock: socket.socket, room: memoryview, flags: int) -> tuple[int, int | None]:
    count, ancillary, _, _ = sock.recvmsg_into([room], _ANCILLARY, _CLOEXEC | flags)
    fds = [fd for _, _, data in ancillary for (fd,) in _FD.iter_unpack(data)]
    for fd in fds[1:]:
        os.close(fd)
    return count, fds[0] if fds else None
