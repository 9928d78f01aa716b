"""tls: a TCP connection that is encrypted, between two sides that both show a certificate.

TLS 1.3. Each side's certificate must be signed by the job's CA; names in it are not looked at,
since workers move. The token's handshake comes after it, inside.
"""

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlinf.comm.config import CommConfig
from rlinf.comm.errors import AuthenticationError, ConfigError
from rlinf.comm.poller import READ, WRITE
from rlinf.comm.transports.base import Surroundings
from rlinf.comm.transports.stream import StreamLink

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Tls:
    """What connections of an endpoint are encrypted with, by who dials."""

    dialler: ssl.SSLContext
    acceptor: ssl.SSLContext

    @classmethod
    def of(cls, config: CommConfig) -> "Tls | None":
        """None where the settings ask for none.

        Raises:
            ConfigError: A file cannot be read, or key and certificate do not belong together.
        """
        if not config.tls_ca:
            return None
        try:
            return cls(
                _context(ssl.PROTOCOL_TLS_CLIENT, config), _context(ssl.PROTOCOL_TLS_SERVER, config)
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"TLS with {config.tls_cert}, {config.tls_key} and {config.tls_ca}: {error}"
            ) from error


def _context(protocol: int, config: CommConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(config.tls_cert, config.tls_key)
    context.load_verify_locations(config.tls_ca)
    return context


class TlsSocket:
    """The methods of a non-blocking socket that a StreamLink uses, over an encrypted one.

    After a write that blocked, OpenSSL wants the same bytes again; a link's queue gives it those.
    One thread may write while another one reads: a lock keeps them apart, as OpenSSL does not.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, data: memoryview | bytes, _flags: int = 0) -> int:
        """As much as can be sent now."""
        view, sent = memoryview(data), 0
        while sent < view.nbytes:
            try:
                with self._lock, _blocking():
                    sent += self._socket.send(view[sent : sent + PIECE_BYTES])
            except BlockingIOError:
                if not sent:
                    raise
                break
        return sent

    def sendmsg(
        self, buffers: Sequence[memoryview | bytes], _ancillary: object = (), _flags: int = 0
    ) -> int:
        """The first buffer, or as many small ones as make a piece."""
        if len(buffers[0]) >= PIECE_BYTES:
            return self.send(buffers[0])
        size = count = 0
        while count < len(buffers) and size + len(buffers[count]) <= PIECE_BYTES:
            size += len(buffers[count])
            count += 1
        return self.send(b"".join(buffers[:count]))

    def recv_into(self, room: memoryview, _nbytes: int = 0, _flags: int = 0) -> int:
        """Fill it as far as there is something: what was decrypted is seen by no poller."""
        got = 0
        while got < room.nbytes:
            try:
                with self._lock, _blocking():
                    count = self._socket.recv_into(room[got:])
            except BlockingIOError:
                if not got:
                    raise
                break
            if not count:
                break
            got += count
        return got


@contextlib.contextmanager
def _blocking() -> Iterator[None]:
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
        raise BlockingIOError from error


class TlsLink(StreamLink):
    """An encrypted TCP connection; it is open once both sides have shown their certificates.

    Args:
        sock: As of `StreamLink`.
        surroundings: As of `StreamLink`.
        tls: What to encrypt with.
        dialled: As of `StreamLink`.
    """

    transport = "tcp"
    shared = False  # what was decrypted and not read yet is seen by no poller

    def __init__(
        self, sock: socket.socket, surroundings: Surroundings, tls: Tls, *, dialled: bool
    ) -> None:
        self._tls = tls
        self._shaking = True
        super().__init__(sock, surroundings, dialled=dialled)
        if not dialled:
            self._wrap()

    def _wrap(self) -> None:
        context = self._tls.dialler if self.dialled else self._tls.acceptor
        wrapped = context.wrap_socket(
            self._socket, server_side=not self.dialled, do_handshake_on_connect=False
        )
        self._socket = TlsSocket(wrapped)  # type: ignore[assignment]

    def _ready(self, flags: int) -> None:
        if self._shaking and not self._connecting:
            self._shake()
            return
        super()._ready(flags)

    def _open(self) -> None:
        """The TCP connection is there."""
        self._writing = False
        self._wrap()
        self._shake()

    def _shake(self) -> None:
        if self._gone:
            return
        try:
            self._socket.do_handshake()  # type: ignore[attr-defined]
        except ssl.SSLWantReadError:
            self._loop.poller.modify(self._fd, READ)
        except ssl.SSLWantWriteError:
            self._loop.poller.modify(self._fd, READ | WRITE)
        except OSError as error:
            self._refuse(error)
            self.close(f"TLS: {_text(error)}")
        else:
            self._shaking = self._writing = False
            self._loop.poller.modify(self._fd, READ)
            if self.dialled:
                self.owner.on_open(self)
            self._read()

    def _read(self) -> None:
        super()._read()
        if not self._gone and self._socket.pending():  # type: ignore[attr-defined]
            self._loop.post(self._read)

    def _receive(self, room: memoryview, flags: int = 0) -> int:
        try:
            return super()._receive(room, flags)
        except ssl.SSLError as error:
            self._refuse(error)
            raise

    def _refuse(self, error: OSError) -> None:
        """A certificate was not good enough for one of the two: no use to try again."""
        if self.authenticated or not isinstance(error, ssl.SSLError):
            return
        if self.dialled:
            self.failure = AuthenticationError(
                f"{self.peer} over tls: {_text(error)}; both sides need a valid certificate of the "
                "CA in tls_ca",
                peer=self.peer,
            )
        else:
            log.warning("a peer that dialled was refused: TLS: %s", _text(error))


def _text(error: OSError) -> str:
    said = getattr(error, "verify_message", None) or getattr(error, "reason", None)
    return str(said or error.strerror or error).replace("_", " ").lower()
