"""What a queue hands on to the queue of the next server, and how that one takes it up."""

from rlinf.channel.core import Queue
from rlinf.channel.journal import ChannelState
from rlinf.channel.spans import Spans


def save(queue: Queue) -> ChannelState:
    """What a restarted server must know of a queue: what the records of its steps add up to."""
    state = ChannelState(queue.name, queue.birth, queue.config, queue.closed)
    state.orders = queue._intake.admitted
    state.acknowledged, state.rejected = queue._acknowledged, queue._rejected
    queue._intake.save(state)
    consumers = queue._consumers
    leased = [run for c in consumers.known.values() for _, run in c.leased]
    for run in sorted([*queue._lanes.all, *leased], key=lambda run: run.order):
        state.items.add(run.order, run)
    for run in queue.dead:
        state.dead.add(run.order, run)
    state.settled = {client: Spans(tags.ranges()) for client, tags in consumers.settled.items()}
    return state


def load(queue: Queue, state: ChannelState) -> None:
    """Have a queue that was just made go on from what another server knew."""
    queue._intake.load(state)
    queue._acknowledged, queue._rejected = state.acknowledged, state.rejected
    for _, run in state.items:
        queue._lanes.append(run)
        queue._portions.returned += run.count if run.returns else 0
    queue._consumers.settled = state.settled
    for _, run in state.dead:
        queue.dead.bury(run)
