"""Chronicle: what a job did lately, kept for whoever looks at it (`rlinf-monitor`)."""

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from rlinf.channel.life import Incident, Span
from rlinf.workers.records import ChunkRecord

__all__ = ["Chronicle"]

T = TypeVar("T", Span, Incident)
MOST_SPANS, MOST_INCIDENTS = 2000, 500
MOST_TOLD = 500
"""At once: the thread that answers has more to do."""


class Chronicle:
    """A sink of chunk records, and of notes. Keeps the last ones; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._incidents: deque[Incident] = deque(maxlen=MOST_INCIDENTS)
        self._span = self._incident = 0

    def __call__(self, record: ChunkRecord) -> None:
        """Keep what one chunk took, part by part."""
        name = f"{record.group}.{record.stage}"
        with self._lock:
            for kind, start, seconds in record.parts():
                self._span += 1
                end = start + seconds
                span = Span(self._span, record.worker, kind, name, record.iteration, start, end)
                self._spans.append(span)

    def note(self, kind: str, who: str, text: str) -> None:
        """Something happened just now; see `rlinf.channel.life.Incident`."""
        with self._lock:
            self._incident += 1
            self._incidents.append(Incident(self._incident, time.time(), kind, who, text))

    def since(self, span: int, incident: int) -> tuple[tuple[Span, ...], tuple[Incident, ...]]:
        """What is kept with higher numbers, the last `MOST_TOLD` of each."""
        with self._lock:
            return _above(self._spans, span), _above(self._incidents, incident)


def _above(kept: Iterable[T], number: int) -> tuple[T, ...]:
    return tuple(one for one in kept if one.number > number)[-MOST_TOLD:]
