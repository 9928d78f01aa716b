"""Window: how much one side may have sent that the other has not received yet. No I/O.

Without it a fast sender would fill the receiver's memory. The receiver's credit travels in the
prefix of whatever frame goes the other way; a sender that stands still asks for it (WANT).
"""

import threading

LETTER_BYTES = 64


class Window:
    """Both directions of one connection. Every count but `consumed` has one writer at a time.

    Attributes:
        given: Bytes the peer says it has received; written by whoever reads the connection.
        refused: A message was not let through: credit is waited for.
        consumed: Bytes of the peer's that were received here, by any thread.
        taken, taken_bytes: Messages received straight from the connection, past the mailbox.
        eager: The peer waits for credit: tell it at once.
    """

    __slots__ = (
        "_limit",
        "_lock",
        "_sent",
        "_told",
        "consumed",
        "eager",
        "given",
        "refused",
        "taken",
        "taken_bytes",
    )

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._sent = self.given = 0
        self._told = self.consumed = 0
        self.taken = self.taken_bytes = 0
        self.refused = self.eager = False

    def take(self, nbytes: int) -> bool:
        """Whether a message may be sent now; one larger than the window, when nothing is out."""
        size = nbytes + LETTER_BYTES
        if self._sent + size - self.given > self._limit:
            self.refused = True  # before another look, so that credit that comes now is told of
            out = self.outstanding()
            if out and out + size > self._limit:
                return False
        self._sent += size
        return True

    def outstanding(self) -> int:
        """Bytes sent that the peer has not received."""
        return max(0, self._sent - self.given)

    def consume(self, nbytes: int) -> bool:
        """A message of the peer's was received here; says whether it should hear of it at once."""
        with self._lock:
            self.consumed += nbytes + LETTER_BYTES
            owed = self.consumed - self._told
        return self.eager or owed * 4 >= self._limit

    def collect(self) -> int:
        """The credit owed, to be put in the frame that leaves now."""
        with self._lock:
            owed = self.consumed - self._told
            self._told = self.consumed
        return owed
