"""Mailbox: matches messages that arrive with receives that were asked for. No I/O.

Order is kept per (source, tag). A receive from ANY takes the oldest message of its tag.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from rlinf.comm.address import WorkerId
from rlinf.comm.frame import Incoming
from rlinf.comm.handle import Handle, Progress


class Any_:  # noqa: N801 - the type of the constant ANY
    """The type of `ANY`."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = Any_()

Source = WorkerId | Any_


class Wish(Handle[Any]):
    """A receive that waits: the handle of its result.

    Args:
        what: As of `Handle`.
        progress: As of `Handle`.
        timeout_s: As of `Handle`.
        source: Whom it wants to hear.
        named: Whether the result is (object, who sent it).
    """

    __slots__ = ("named", "source")

    def __init__(
        self, what: str, progress: Progress, timeout_s: float | None, source: Source, named: bool
    ) -> None:
        super().__init__(what, progress=progress, timeout_s=timeout_s)
        self.source = source
        self.named = named


class Mailbox:
    """Thread-safe. Wishes are fulfilled outside its lock.

    Args:
        fulfil: Decodes a letter and completes the handle of a wish; False: nobody cares any more.
    """

    def __init__(self, fulfil: Callable[[Wish, Incoming], bool]) -> None:
        self._fulfil = fulfil
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._letters: dict[int, dict[WorkerId, deque[Incoming]]] = {}
        self._wishes: dict[int, deque[Wish]] = {}
        self._hope: Source | None = None
        self._hoped_tag = 0
        self._answer: Incoming | None = None
        self.nbytes = 0

    def deliver(self, letter: Incoming) -> bool:
        """Give a letter to the first wish that takes it, else keep it; says whether taken."""
        while True:
            with self._lock:
                wish = self._matching(letter) if self._wishes else None
                if wish is None:
                    hope = self._hope
                    if (hope is letter.source or hope is ANY) and self._hoped_tag == letter.tag:
                        self._hope, self._answer = None, letter
                        return True
                    letter.order = next(self._order)
                    self._keep(letter)
                    return False
            if self._fulfil(wish, letter):
                return True

    def take(self, source: Source, tag: int) -> Incoming | None:
        """The oldest letter there is for this source and tag, if any."""
        if not self._letters:
            return None
        with self._lock:
            return self._take(source, tag)

    def hope(self, source: Source, tag: int) -> Incoming | None:
        """The same; and the next one that comes, if no wish takes it, is kept for `answer`.

        For the thread that dispatches, about to look for it: there is one at a time.
        """
        with self._lock:
            letter = self._take(source, tag)
            if letter is None:
                self._hope, self._hoped_tag = source, tag
            return letter

    def answer(self) -> Incoming | None:
        """What has come of the last `hope`."""
        letter, self._hope, self._answer = self._answer, None, None
        return letter

    def wish(self, tag: int, wish: Wish) -> Incoming | None:
        """A letter that is there already, else None: the wish is kept for one that comes."""
        with self._lock:
            letter = self._take(wish.source, tag)
            if letter is None:
                wishes = self._wishes.setdefault(tag, deque())
                if wishes and wishes[0].done():
                    self._sweep(tag)
                    wishes = self._wishes.setdefault(tag, deque())
                wishes.append(wish)
            return letter

    def wishes(self, source: WorkerId | None = None) -> list[Wish]:
        """What waits for this source in particular (None: everything that waits)."""
        with self._lock:
            return [
                wish
                for wishes in self._wishes.values()
                for wish in wishes
                if source is None or wish.source == source
            ]

    def _matching(self, letter: Incoming) -> Wish | None:
        """Under the lock. Wishes whose handle is done (withdrawn, expired) are dropped."""
        wishes = self._wishes.get(letter.tag)
        if wishes is None:
            return None
        for index, wish in enumerate(wishes):
            if wish.done():
                self._sweep(letter.tag)
                return self._matching(letter)
            if wish.source is letter.source or wish.source is ANY or wish.source == letter.source:
                del wishes[index]
                if not wishes:
                    del self._wishes[letter.tag]
                return wish
        return None

    def _sweep(self, tag: int) -> None:
        pending = deque(wish for wish in self._wishes[tag] if not wish.done())
        if pending:
            self._wishes[tag] = pending
        else:
            del self._wishes[tag]

    def _keep(self, letter: Incoming) -> None:
        sources = self._letters.get(letter.tag)
        if sources is None:
            sources = self._letters[letter.tag] = {}
        queue = sources.get(letter.source)
        if queue is None:
            sources[letter.source] = deque((letter,))
        else:
            queue.append(letter)
        self.nbytes += letter.nbytes

    def _take(self, source: Source, tag: int) -> Incoming | None:
        sources = self._letters.get(tag)
        if sources is None:
            return None
        if isinstance(source, WorkerId):
            queue = sources.get(source)
        else:
            queue = min(sources.values(), key=lambda letters: letters[0].order)
        if queue is None:
            return None
        letter = queue.popleft()
        if not queue:
            del sources[letter.source]
            if not sources:
                del self._letters[tag]
        self.nbytes -= letter.nbytes
        return letter
