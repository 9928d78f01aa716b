"""Mailbox: matches messages that arrive with receives that were asked for. No I/O.

Order is kept per (source, tag). A receive from ANY takes the oldest message of its tag.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from rlinf.comm.address import WorkerId
from rlinf.comm.frame import RAW, Incoming
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

    Attributes:
        letters: By tag and source; no entry is empty.
        wishes: By tag; no entry is empty.
        nbytes: Of all letters.
    """

    def __init__(self, fulfil: Callable[[Wish, Incoming], bool]) -> None:
        self._fulfil = fulfil
        self._lock = threading.Lock()
        self._order = itertools.count()
        self.letters: dict[int, dict[WorkerId, deque[Incoming]]] = {}
        self.wishes: dict[int, deque[Wish]] = {}
        self.nbytes = 0

    def deliver(self, letter: Incoming) -> None:
        """Give a letter to the first wish that takes it, else keep it; a bundle, to several."""
        one: Incoming | None = None
        while True:
            with self._lock:
                wish = self._matching(letter) if self.wishes else None
                if wish is None:
                    self._keep(letter, one)
                    return
                if one is None:
                    one = letter.split()
            if self._fulfil(wish, one):
                if not letter.rest:
                    return
                one = None

    def take(self, source: Source, tag: int) -> Incoming | None:
        """The oldest letter there is for this source and tag, if any."""
        if not self.letters:
            return None
        with self._lock:
            return self._take(source, tag)

    def take_bundle(self, source: Source, tag: int, most: int) -> Incoming | None:
        """The same; all that is left of a raw bundle, if that is no more than `most` messages."""
        if not self.letters:
            return None
        with self._lock:
            return self._take(source, tag, most=most)

    def put_back(self, letter: Incoming) -> None:
        """What was taken is to be the first again."""
        with self._lock:
            sources = self.letters.setdefault(letter.tag, {})
            queue = sources.setdefault(letter.source, deque())
            letter.order = queue[0].order if queue else next(self._order)
            queue.appendleft(letter)
            self.nbytes += letter.nbytes

    def wish(self, tag: int, wish: Wish) -> Incoming | None:
        """A letter that is there already, else None: the wish is kept for one that comes."""
        with self._lock:
            letter = self._take(wish.source, tag)
            if letter is None:
                wishes = self.wishes.setdefault(tag, deque())
                if wishes and wishes[0].done():
                    self._sweep(tag)
                    wishes = self.wishes.setdefault(tag, deque())
                wishes.append(wish)
            return letter

    def wishes_of(self, source: WorkerId | None = None) -> list[Wish]:
        """What waits for this source in particular (None: everything that waits)."""
        with self._lock:
            return [
                wish
                for wishes in self.wishes.values()
                for wish in wishes
                if source is None or wish.source == source
            ]

    def _matching(self, letter: Incoming) -> Wish | None:
        """Under the lock. Wishes whose handle is done (withdrawn, expired) are dropped."""
        wishes = self.wishes.get(letter.tag)
        if wishes is None:
            return None
        for index, wish in enumerate(wishes):
            if wish.done():
                self._sweep(letter.tag)
                return self._matching(letter)
            if wish.source is letter.source or wish.source is ANY or wish.source == letter.source:
                del wishes[index]
                if not wishes:
                    del self.wishes[letter.tag]
                return wish
        return None

    def _sweep(self, tag: int) -> None:
        pending = deque(wish for wish in self.wishes[tag] if not wish.done())
        if pending:
            self.wishes[tag] = pending
        else:
            del self.wishes[tag]

    def _keep(self, letter: Incoming, one: Incoming | None) -> None:
        """Under the lock. `one` was split off, but nobody took it."""
        letter.order = next(self._order)
        if one is not None and letter.rest is not None:
            letter.rest.appendleft(one.header)
            letter.nbytes += one.nbytes
        sources = self.letters.get(letter.tag)
        if sources is None:
            sources = self.letters[letter.tag] = {}
        queue = sources.get(letter.source)
        if queue is None:
            sources[letter.source] = deque((letter,))
        else:
            queue.append(letter)
        self.nbytes += letter.nbytes

    def _queue(self, source: Source, tag: int) -> deque[Incoming] | None:
        """Where the oldest letter for this source and tag is the first. Under the lock."""
        sources = self.letters.get(tag)
        if sources is None:
            return None
        if isinstance(source, WorkerId):
            return sources.get(source)
        return min(sources.values(), key=lambda letters: letters[0].order)

    def _take(self, source: Source, tag: int, *, most: int = 0) -> Incoming | None:
        """A raw bundle of no more than `most` messages is taken whole. Under the lock."""
        queue = self._queue(source, tag)
        if queue is None:
            return None
        letter = queue[0]
        whole = letter.rest is not None and len(letter.rest) <= most and bool(letter.flags & RAW)
        one = letter if whole else letter.split()
        if whole or not letter.rest:
            queue.popleft()
            if not queue:
                del self.letters[tag][letter.source]
                if not self.letters[tag]:
                    del self.letters[tag]
        self.nbytes -= one.nbytes
        return one
