"""Window: how much one side may have sent that the other has not received yet. No I/O.

Without it a fast sender would fill the receiver's memory. The receiver's credit travels in the
prefix of whatever frame goes the other way; a sender that stands still asks for it (WANT).
"""

import threading

LETTER_BYTES = 64


def weight(nbytes: int) -> int:
    """What a message of that size takes of the window."""
    return nbytes + LETTER_BYTES


class Window:
    """Both directions of one connection. What was sent is guarded by its owner's lock."""

    __slots__ = ("_limit", "_lock", "_outstanding", "_owed", "eager")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._outstanding = 0
        self._lock = threading.Lock()
        self._owed = 0
        self.eager = False

    def take(self, nbytes: int) -> bool:
        """Whether a message may be sent now; one larger than the window, when nothing is out."""
        size = weight(nbytes)
        if self._outstanding and self._outstanding + size > self._limit:
            return False
        self._outstanding += size
        return True

    def give(self, credit: int) -> None:
        """The peer has received so much."""
        self._outstanding = max(0, self._outstanding - credit)

    def consume(self, nbytes: int) -> bool:
        """A message of the peer's was received here; says whether it should hear of it at once."""
        with self._lock:
            self._owed += weight(nbytes)
            return self.eager or self._owed * 4 >= self._limit

    def collect(self) -> int:
        """The credit owed, to be put in the frame that leaves now."""
        if not self._owed:
            return 0
        with self._lock:
            owed, self._owed = self._owed, 0
            return owed

    @property
    def outstanding(self) -> int:
        """Bytes sent that the peer has not received."""
        return self._outstanding
