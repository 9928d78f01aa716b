"""A snapshot in the text format that Prometheus reads: pure."""

from collections.abc import Iterator

from rlinf.channel.snapshot import Snapshot

Sample = tuple[dict[str, str], float]

HELP = {
    "rlinf_up_seconds": "gauge Seconds since the channel server began to serve.",
    "rlinf_workers": "gauge Workers in the registry.",
    "rlinf_channel_items": "gauge Items queued.",
    "rlinf_channel_leased_items": "gauge Items given out and not acknowledged.",
    "rlinf_channel_bytes": "gauge Bytes queued and leased.",
    "rlinf_channel_bound_bytes": "gauge Most bytes that the channel holds.",
    "rlinf_channel_put_items_total": "counter Items taken in.",
    "rlinf_channel_put_bytes_total": "counter Bytes taken in.",
    "rlinf_channel_done_items_total": "counter Items acknowledged or rejected.",
    "rlinf_channel_redelivered_items_total": "counter Items given back.",
    "rlinf_channel_dead_items_total": "counter Items kept aside.",
    "rlinf_channel_longest_wait_seconds": "gauge How long the oldest waiting request has waited.",
    "rlinf_consumer_outstanding_weight": "gauge Weight given and not acknowledged.",
    "rlinf_consumer_finished_weight_total": "counter Weight acknowledged.",
    "rlinf_lock_holders": "gauge Holders of devices.",
    "rlinf_lock_waiters": "gauge Who waits for devices.",
    "rlinf_lock_longest_wait_seconds": "gauge How long the first in line has waited.",
}
"""Name -> its type and what it says."""


def exposition(snapshot: Snapshot) -> str:
    """The text, version 0.0.4, each metric with its help and type."""
    samples: dict[str, list[Sample]] = {name: [] for name in HELP}
    for name, labels, value in _samples(snapshot):
        samples[name].append((labels, value))
    lines = []
    for name, found in samples.items():
        kind, _, text = HELP[name].partition(" ")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels(labels)} {value:.10g}" for labels, value in found]
    return "\n".join(lines) + "\n"


def _samples(snapshot: Snapshot) -> Iterator[tuple[str, dict[str, str], float]]:
    server, lock = snapshot.server, snapshot.server.lock
    yield "rlinf_up_seconds", {}, server.up_s
    yield "rlinf_workers", {}, len(snapshot.peers)
    for channel in server.channels:
        of = {"channel": channel.name}
        yield "rlinf_channel_items", of, channel.depth
        yield "rlinf_channel_leased_items", of, channel.leased_items
        yield "rlinf_channel_bytes", of, channel.held_bytes
        yield "rlinf_channel_bound_bytes", of, channel.max_bytes
        yield "rlinf_channel_put_items_total", of, channel.put_items
        yield "rlinf_channel_put_bytes_total", of, channel.put_bytes
        done = channel.acknowledged_items + channel.rejected_items
        yield "rlinf_channel_done_items_total", of, done
        yield "rlinf_channel_redelivered_items_total", of, channel.redelivered_items
        yield "rlinf_channel_dead_items_total", of, channel.dead_items
        longest = max((one.since_s for one in channel.waiting), default=0.0)
        yield "rlinf_channel_longest_wait_seconds", of, longest
        for consumer in channel.consumers:
            who = of | {"consumer": consumer.id}
            yield "rlinf_consumer_outstanding_weight", who, consumer.outstanding_weight
            yield "rlinf_consumer_finished_weight_total", who, consumer.finished_weight
    yield "rlinf_lock_holders", {}, len(lock.holders)
    yield "rlinf_lock_waiters", {}, len(lock.waiters)
    longest = max((one.since_s for one in lock.waiters), default=0.0)
    yield "rlinf_lock_longest_wait_seconds", {}, longest


def _labels(labels: dict[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
