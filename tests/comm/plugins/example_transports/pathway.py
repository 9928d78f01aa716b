"""pathway: frames over a Unix socket in the file system, for hosts without abstract sockets."""

import contextlib
import socket
import tempfile
from pathlib import Path

from rlinf.comm import Address
from rlinf.comm.transports.base import Link, Surroundings, Transport
from rlinf.comm.transports.stream import StreamLink


class PathwayLink(StreamLink):
    """All bytes go over the socket."""

    transport = "pathway"


class PathwayTransport(Transport):
    """Listens at a path that goes with the endpoint."""

    name = "pathway"
    scheme = "pathway"

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._folder = tempfile.TemporaryDirectory(prefix="rlinf-")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def listen(self) -> Address:
        path = str(Path(self._folder.name) / "socket")
        self._socket.bind(path)
        self._socket.listen(128)
        self._socket.setblocking(False)
        self.surroundings.loop.poller.register(self._socket.fileno(), self._accept)
        return Address(self.scheme, path=path)

    def dial(self, address: Address) -> Link:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(address.path)
        except OSError:
            sock.close()
            raise
        return PathwayLink(sock, self.surroundings, dialled=True)

    def close(self) -> None:
        self.surroundings.loop.poller.unregister(self._socket.fileno())
        self._socket.close()
        self._folder.cleanup()

    def abandon(self) -> None:
        self._socket.close()

    def _accept(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                sock, _peer = self._socket.accept()
                sock.setblocking(False)
                link = PathwayLink(sock, self.surroundings, dialled=False)
                self.surroundings.owner.on_accept(link)
