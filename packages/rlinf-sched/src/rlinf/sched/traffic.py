"""Who sent how much to whom, over what, in a trace of communication."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.sched.trace import Span

COMMUNICATION = "comm"


@dataclass(frozen=True, slots=True)
class Traffic:
    """From one worker to another.

    Attributes:
        transport: The last that connected them; empty: they were connected before the trace.
        messages: Messages, requests and replies.
    """

    sender: str
    receiver: str
    transport: str
    messages: int
    nbytes: int


def traffic(spans: Sequence[Span]) -> tuple[Traffic, ...]:
    """By pair, the most bytes first; () where communication was not traced."""
    transports: dict[frozenset[str], str] = {}
    sums: dict[tuple[str, str], list[int]] = {}
    for span in spans:
        peer = str(span.arguments.get("peer", ""))
        if span.kind != COMMUNICATION or not peer:
            continue
        if transport := str(span.arguments.get("transport", "")):
            transports[frozenset((span.process, peer))] = transport
        elif span.name.startswith("send "):
            total = sums.setdefault((span.process, peer), [0, 0])
            total[0] += 1
            total[1] += span.nbytes
    found = [
        Traffic(sender, receiver, transports.get(frozenset((sender, receiver)), ""), *total)
        for (sender, receiver), total in sums.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.nbytes, one.sender, one.receiver)))
