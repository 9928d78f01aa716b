"""tcp: between any two hosts. One connection a pair of endpoints, buffers written as they lie."""

import contextlib
import socket

from rlinf.comm.address import Address
from rlinf.comm.errors import ConfigError
from rlinf.comm.transports.base import Link, Surroundings, Transport
from rlinf.comm.transports.stream import StreamLink
from rlinf.comm.transports.tls import Tls, TlsLink

BACKLOG = 1024
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))


class TcpLink(StreamLink):
    """A TCP connection."""

    transport = "tcp"


class TcpTransport(Transport):
    """Listens on a port the system chooses, so that no two processes ever want the same one."""

    name = "tcp"
    scheme = "tcp"

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._socket: socket.socket | None = None
        self._tls = Tls.of(surroundings.config)
        if self._tls is not None:
            self.scheme = "tls"  # type: ignore[misc]

    def listen(self) -> Address:
        """Bind and accept on `config.host` and `config.port`. Raises `ConfigError` if it cannot."""
        host = self.surroundings.config.host or "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = self.surroundings.config.port
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error.strerror}; "
                "CommConfig.host must be an address of this machine, and the port free (0: any)"
            ) from error
        self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self.surroundings.loop.poller.register(self._socket.fileno(), self._accept)
        return Address(self.scheme, host=host, port=self._socket.getsockname()[1])

    def dial(self, address: Address) -> Link:
        """Begin to connect."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        tune(sock)
        code = sock.connect_ex((address.host, address.port))
        if code not in (0, 115, 36):  # EINPROGRESS on Linux, on macOS
            sock.close()
            raise OSError(code, f"cannot connect to {address}")
        return self.link(sock, dialled=True)

    def link(self, sock: socket.socket, *, dialled: bool) -> Link:
        """The link over a socket."""
        if self._tls is not None:
            return TlsLink(sock, self.surroundings, self._tls, dialled=dialled)
        return TcpLink(sock, self.surroundings, dialled=dialled)

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self.surroundings.loop.poller.unregister(self._socket.fileno())
            self._socket.close()

    def abandon(self) -> None:
        """In a forked child: close our copy of the listening socket."""
        if self._socket is not None:
            self._socket.close()

    def _accept(self, _: int) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                sock, _peer = self._socket.accept()
                tune(sock)
                self.surroundings.owner.on_accept(self.link(sock, dialled=False))


def tune(sock: socket.socket) -> None:
    """Not blocking, no delay, and noticing a peer that is gone."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def host_towards(target: str) -> str:
    """The address of this host that `target` (a host name or address) can answer to.

    The host's own name is not asked: on many systems it maps to 127.0.1.1. "Connecting" a UDP
    socket sends nothing and tells which interface the system would use.

    Raises:
        OSError: There is no way to that host.
    """
    family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])
