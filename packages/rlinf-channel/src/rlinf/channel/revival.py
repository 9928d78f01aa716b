"""What a queue hands on to the queue of the next server, and how that one takes it up."""

from rlinf.channel.core import Queue
from rlinf.channel.journal import ChannelState


def save(queue: Queue) -> ChannelState:
    """What a restarted server must know of a queue: what the records of its steps add up to."""
    state = ChannelState(queue.name, queue.birth, queue.config, queue.closed)
    state.orders = queue._intake.admitted
    state.acknowledged, state.rejected = queue._acknowledged, queue._rejected
    queue._intake.save(state)
    consumers = queue._consumers
    leased = [item for c in consumers.known.values() for item in c.leased.values()]
    items = sorted([*queue._lanes.all, *leased], key=lambda item: item.order)
    state.items = {item.order: item for item in items}
    state.dead = {item.order: item for item in queue.dead}
    state.settled = {client: list(tags) for client, tags in consumers.settled.items()}
    return state


def load(queue: Queue, state: ChannelState) -> None:
    """Have a queue that was just made go on from what another server knew."""
    queue._intake.load(state)
    queue._acknowledged, queue._rejected = state.acknowledged, state.rejected
    queue._lanes.append_all(tuple(state.items.values()))
    queue._portions.returned = sum(item.returns > 0 for item in state.items.values())
    queue._consumers.settled = state.settled
    for item in state.dead.values():
        queue.dead.bury(item)
