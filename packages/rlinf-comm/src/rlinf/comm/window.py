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
        consumed: Bytes of the peer's that were received here by way of the mailbox.
        taken, passed: Messages received past it and their bytes; by whoever reads the connection.
        kept, kept_bytes: Those that came with them in a bundle and are in the mailbox.
        told: How much of all that the peer knows of; written by whoever sends.
        eager: The peer waits for credit: tell it at once.
        enough: So much that the peer does not know of yet is told at once.
    """

    __slots__ = (
        "_limit",
        "_lock",
        "_sent",
        "consumed",
        "eager",
        "enough",
        "given",
        "kept",
        "kept_bytes",
        "passed",
        "refused",
        "taken",
        "told",
    )

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._sent = self.given = 0
        self.consumed = self.taken = self.passed = self.told = 0
        self.kept = self.kept_bytes = 0
        self.refused = self.eager = False
        self.enough = limit_bytes // 4

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
        """A message of the peer's was received; says whether it should hear of it at once."""
        with self._lock:
            self.consumed += nbytes + LETTER_BYTES
        return self.eager or self.consumed + self.passed - self.told >= self.enough

    def collect(self) -> int:
        """The credit owed, to be put in the frame that leaves now; by one thread at a time."""
        known, self.told = self.told, self.consumed + self.passed
        return self.told - known
