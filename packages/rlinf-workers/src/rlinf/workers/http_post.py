"""POST with a deadline for the whole exchange, however slowly the answer comes."""

import contextlib
import http.client
import socket
import threading
from urllib.parse import urlsplit

__all__ = ["FAILURES", "RETRIED", "Refused", "post"]

RETRIED = frozenset({429, 500, 502, 503, 504})
"""Codes of answers that may be different the next time."""
LARGEST_ANSWER_BYTES = 1 << 24


class Refused(Exception):
    """The answer has another status than 200; `body` is what it says beside that."""

    def __init__(self, status: int, body: bytes = b"") -> None:
        super().__init__(f"status {status}")
        self.status, self.body = status, body


FAILURES = (OSError, http.client.HTTPException)
"""What `post` raises beside `Refused`: no connection, a time-out, no HTTP."""


def post(url: str, body: bytes, left_s: float) -> bytes:
    """The body of the answer to JSON `body`, complete after `left_s` seconds.

    Raises `Refused` for another status than 200, and `FAILURES`.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=left_s)
    late = threading.Timer(left_s, _shut, [connection])
    late.start()
    try:
        path = parts.path or "/"
        headers = {"Content-Type": "application/json"}
        target = f"{path}?{parts.query}" if parts.query else path
        connection.request("POST", target, body, headers)
        with contextlib.closing(connection.getresponse()) as answer:
            found = answer.read(LARGEST_ANSWER_BYTES)
        if answer.status != http.client.OK:
            raise Refused(answer.status, found)
        return found
    finally:
        late.cancel()
        connection.close()


def _shut(connection: http.client.HTTPConnection) -> None:
    """Wake up whoever reads from it: a time-out of each read alone does not end a slow answer."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
