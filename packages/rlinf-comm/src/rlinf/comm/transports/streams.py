"""streams: large buffers over several TCP connections at once, beside one for everything else.

Between distant hosts one connection seldom fills the line: it sends no more than its window a round
trip, and halves that for every lost packet. Here a buffer is cut into as many stripes as there are
connections (`CommConfig.tcp_streams`), each written from the original memory and read into the
final one. The connections are made when the first large buffer goes that way: the receiving end
listens on a port the system chooses and says so over the connection there is, with a secret that
whoever connects has to know.
"""

import hmac
import json
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from rlinf.comm.config import CommConfig
from rlinf.comm.device import Device
from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.errors import Timeout
from rlinf.comm.transports.base import Transport
from rlinf.comm.transports.carrier import Buffer, Carrier, Notes
from rlinf.comm.transports.carrying import CarryingTransport
from rlinf.comm.transports.gloo import encryption
from rlinf.comm.transports.tcp import TcpTransport, tune

LARGE_CHUNKS: Final = 4
"""Buffers of fewer chunks go over the one connection: they are there before stripes would be."""

SECRET_BYTES: Final = 16
STRIPE_BYTES: Final = 1 << 16
"""Stripes are multiples of this, but for the last."""

Memory = Callable[[int], memoryview]


class StreamsCarrier:
    """One end of one direction.

    Args:
        sockets: The connections, not blocking, in the same order at both ends.
        memory: Where what is received is to lie.
        timeout_s: How long nothing may move.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], memory: Memory, timeout_s: float | None
    ) -> None:
        self._sockets = sockets
        self._memory = memory
        self._timeout_ms = None if timeout_s is None else timeout_s * 1000

    def offer(self, buffer: Buffer) -> bytes:
        """Nothing to prepare."""
        return b""

    def send(self, buffer: Buffer) -> None:
        """Send one, a stripe a connection."""
        self._move(self._stripes(buffer), select.POLLOUT, socket.socket.send)

    def receive(self, nbytes: int, place: bytes) -> memoryview:
        """Receive one, all stripes into one piece of memory."""
        memory = self._memory(nbytes)
        self._move(self._stripes(memory), select.POLLIN, socket.socket.recv_into)
        return memory

    def close(self) -> None:
        """Close the connections; who waits for one gets an error."""
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                sock.close()

    def __del__(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _stripes(self, buffer: memoryview) -> list[memoryview]:
        count = len(self._sockets)
        size = -(-buffer.nbytes // (count * STRIPE_BYTES)) * STRIPE_BYTES
        return [buffer[at * size : (at + 1) * size] for at in range(count)]

    def _move(
        self,
        stripes: list[memoryview],
        event: int,
        step: Callable[[socket.socket, memoryview], int],
    ) -> None:
        """Send or receive all stripes, whichever connection is ready."""
        poll = select.poll()
        left = {}
        for sock, stripe in zip(self._sockets, stripes, strict=True):
            if stripe.nbytes:
                left[sock.fileno()] = sock, stripe
                poll.register(sock, event)
        while left:
            ready = poll.poll(self._timeout_ms)
            if not ready:
                raise Timeout(
                    f"{len(left)} of {len(stripes)} streams do not move", operation="move"
                )
            for fd, _ in ready:
                sock, stripe = left[fd]
                try:
                    count = step(sock, stripe)
                except BlockingIOError:
                    continue
                if not count:
                    raise ConnectionError("the peer closed a stream")
                if count < stripe.nbytes:
                    left[fd] = sock, stripe[count:]
                else:
                    poll.unregister(fd)
                    del left[fd]


class StreamsTransport(CarryingTransport):
    """Host buffers of four chunks (`chunk_bytes`) or more by several connections, others by one."""

    name = "streams"
    scheme = "streams"
    inner: type[Transport] = TcpTransport

    @classmethod
    def unsuited(cls, device: Device, config: CommConfig) -> str | None:
        """Only where there are to be several."""
        return encryption(config) or ("tcp_streams is 1" if config.tcp_streams == 1 else None)

    def carries(self, buffer: Buffer) -> bool:
        """Large ones, in host memory."""
        is_large: bool = buffer.nbytes >= LARGE_CHUNKS * self.surroundings.config.chunk_bytes
        return is_large and type(buffer) is not OnDevice

    def make(self, notes: Notes, sending: bool) -> Carrier:
        """Connect to the receiving end, or be it; it has the say in how many connections."""
        config = self.surroundings.config
        timeout_s = config.connection_timeout_s
        if sending:
            notes.send("listen", b"")
            sockets = _connect(notes.get("streams"), timeout_s)
        else:
            sockets = _accept(notes, config.host or "127.0.0.1", config.tcp_streams, timeout_s)
        return StreamsCarrier(sockets, self.surroundings.memory, timeout_s)


def _accept(notes: Notes, host: str, count: int, timeout_s: float) -> list[socket.socket]:
    """The connections that come, by the number that they say they have."""
    secret = secrets.token_bytes(SECRET_BYTES)
    deadline = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=count) as listener:
        meet = {"host": host, "port": listener.getsockname()[1], "streams": count}
        notes.set("streams", json.dumps({**meet, "secret": secret.hex()}).encode())
        try:
            while len(found) < count:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                sock, _ = listener.accept()
                number = _number(sock, secret)
                if number is None or number >= count or number in found:
                    sock.close()
                else:
                    tune(sock)
                    found[number] = sock
        except TimeoutError:
            for sock in found.values():
                sock.close()
            raise Timeout(
                f"{len(found)} of {count} streams were made within {timeout_s} s; the peer has to "
                f"reach {host} on any port, else set tcp_streams=1",
                operation="setup",
            ) from None
    return [found[number] for number in range(count)]


def _number(sock: socket.socket, secret: bytes) -> int | None:
    """Which connection this is; None where it does not know the secret, or says nothing."""
    sock.settimeout(1.0)
    try:
        said = sock.recv(SECRET_BYTES + 1, socket.MSG_WAITALL)
    except OSError:
        return None
    known = len(said) > SECRET_BYTES and hmac.compare_digest(said[:SECRET_BYTES], secret)
    return said[SECRET_BYTES] if known else None


def _connect(said: bytes, timeout_s: float) -> list[socket.socket]:
    """Connections to the receiving end, which has said where and how many."""
    meet = json.loads(said)
    sockets = []
    for number in range(int(meet["streams"])):
        sock = socket.create_connection((meet["host"], meet["port"]), timeout_s)
        sock.sendall(bytes.fromhex(meet["secret"]) + bytes((number,)))
        tune(sock)
        sockets.append(sock)
    return sockets
