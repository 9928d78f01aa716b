"""Window: how much one side may have sent that the other has not received yet. No I/O.

Without it a fast sender would fill the receiver's memory. The receiver's credit travels in the
prefix of whatever frame goes the other way; a sender that stands still asks for it (WANT).
"""

from collections import deque

LETTER_BYTES = 64


class Window:
    """Both directions of one connection. What was sent is guarded by its owner's lock."""

    __slots__ = ("_given", "_limit", "_outstanding", "_owed", "_received", "eager")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._outstanding = 0
        # Appended to by whoever dispatches, emptied by whoever sends.
        self._given: deque[int] = deque()
        # Appended to by receivers of any thread, emptied by whoever sends: no lock needed.
        self._received: deque[int] = deque()
        self._owed = 0
        self.eager = False

    def take(self, nbytes: int) -> bool:
        """Whether a message may be sent now; one larger than the window, when nothing is out."""
        size = nbytes + LETTER_BYTES
        if self._outstanding + size > self._limit:
            out = self.outstanding()
            if out and out + size > self._limit:
                return False
        self._outstanding += size
        return True

    def give(self, credit: int) -> None:
        """The peer has received so much. Needs no lock."""
        self._given.append(credit)

    def outstanding(self) -> int:
        """Bytes sent that the peer has not received."""
        while self._given:
            self._outstanding -= self._given.popleft()
        self._outstanding = max(0, self._outstanding)
        return self._outstanding

    def consume(self, nbytes: int) -> bool:
        """A message of the peer's was received here; says whether it should hear of it at once."""
        size = nbytes + LETTER_BYTES
        self._received.append(size)
        self._owed += size  # only to know when it is much; the sum that counts is made below
        return self.eager or self._owed * 4 >= self._limit

    def collect(self) -> int:
        """The credit owed, to be put in the frame that leaves now."""
        if not self._received:
            return 0
        self._owed = 0
        total = 0
        while self._received:
            try:
                total += self._received.popleft()
            except IndexError:  # another thread has just taken it
                break
        return total
