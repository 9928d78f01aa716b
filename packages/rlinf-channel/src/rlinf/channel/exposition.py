"""A snapshot in the text format that Prometheus reads: pure."""

from collections import Counter
from collections.abc import Iterator

from rlinf.channel.findings import ENDS, findings
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
    "rlinf_worker_running": "gauge 1: it takes calls; 0: it is being started.",
    "rlinf_worker_restarts_total": "counter How often it was started again.",
    "rlinf_worker_silent_seconds": "gauge Since its last sign of life.",
    "rlinf_worker_memory_bytes": "gauge Resident memory of its process.",
    "rlinf_worker_processor_seconds_total": "counter Processor time that its process has used.",
    "rlinf_findings": "gauge How much is wrong just now, by kind.",
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
    kinds = Counter(one.kind for one in findings(snapshot))
    yield from (("rlinf_findings", {"kind": kind}, kinds[kind]) for kind in ENDS)
    for worker in snapshot.life.workers if snapshot.life is not None else ():
        of = {"worker": worker.id}
        yield "rlinf_worker_running", of, worker.running
        yield "rlinf_worker_restarts_total", of, worker.restarts
        yield "rlinf_worker_silent_seconds", of, worker.heard_s
        yield "rlinf_worker_memory_bytes", of, worker.rss_bytes
        yield "rlinf_worker_processor_seconds_total", of, worker.cpu_s


def _labels(labels: dict[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
