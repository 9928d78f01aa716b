"""What is a thing of its own in another place: on the disk, and in each message."""

from dataclasses import replace

from rlinf.channel.journal import ChannelState
from rlinf.channel.messages import Put
from rlinf.channel.spans import RunMap, Spans


def own_put(put: Put, ticket: int) -> Put:
    """The put as one message brings it: with runs of its own."""
    runs = [run.copy() for run in put.runs]
    return Put(ticket, put.producer, put.first, runs, put.deadline, put.atomic)


def revived(state: ChannelState) -> ChannelState:
    """A copy as it is read from a disk: runs of its own, which nobody has returned yet."""
    producers = {client: replace(known) for client, known in state.producers.items()}
    settled = {client: Spans(tags.ranges()) for client, tags in state.settled.items()}
    items, dead = _copied(state.items), _copied(state.dead)
    return replace(state, producers=producers, settled=settled, items=items, dead=dead)


def _copied(runs: RunMap) -> RunMap:
    copies = RunMap()
    for order, run in runs:
        copy = run.copy()
        copy.returns = 0
        copies.add(order, copy)
    return copies
