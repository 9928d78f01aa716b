"""What the monitor finds wrong, and its log: pure."""

import json

from rlinf.channel.exposition import exposition
from rlinf.channel.findings import Finding, Log, findings
from rlinf.channel.life import Incident, Life, Span, WorkerLife
from rlinf.channel.snapshot import Peer, Snapshot, as_json
from rlinf.channel.statistics import (
    ChannelStatistics,
    ConsumerStatistics,
    Holder,
    LockStatistics,
    ServerStatistics,
    Waiting,
)
from rlinf.channel.terminal import paint
from rlinf.channel.view import draw


def consumer(name: str, items: int) -> ConsumerStatistics:
    return ConsumerStatistics(name, 1.0, 0, 0.0, items, float(items), 0.0, 0.0, 0)


def channel(**changes: object) -> ChannelStatistics:
    numbers = dict.fromkeys(ChannelStatistics.__dataclass_fields__, 0)
    usual = numbers | {"name": "q", "policy": "weighted", "max_items": None, "max_bytes": 100}
    usual |= {"closed": False, "consumers": (), "waiting": ()}
    return ChannelStatistics(**(usual | changes))  # type: ignore[arg-type]


def snapshot(
    *channels: ChannelStatistics,
    lock: LockStatistics | None = None,
    peers: tuple[Peer, ...] = (),
    life: Life | None = None,
) -> Snapshot:
    lock = lock or LockStatistics((), (), 0, 0)
    return Snapshot(ServerStatistics("channel/0", 9.0, channels, lock), peers, 0.0, life)


def kinds(seen: Snapshot) -> list[tuple[str, str]]:
    return [(one.kind, one.who) for one in findings(seen)]


def worker(name: str = "w/0", **changes: object) -> WorkerLife:
    usual: dict[str, object] = {"running": True, "restarts": 0, "pid": 7, "heard_s": 1.0}
    return WorkerLife(name, **(usual | {"beat_s": 2.0} | changes))  # type: ignore[arg-type]


def test_nothing_is_wrong_with_what_is_well() -> None:
    even = channel(consumers=(consumer("a", 50), consumer("b", 40)), depth=1, max_items=1)
    assert kinds(snapshot(even, life=Life(0.0, (worker(),)), peers=(Peer("a", 1, "", ""),))) == []


def test_a_channel_is_full_for_whoever_waits_to_put() -> None:
    def waiting(operation: str, since_s: float) -> ChannelStatistics:
        return channel(max_items=2, depth=2, waiting=(Waiting("p/0#1", operation, since_s),))

    assert kinds(snapshot(waiting("put", 0.1))) == kinds(snapshot(waiting("take", 9.0))) == []
    [one] = findings(snapshot(waiting("commit", 1.5)))
    assert one.text == "q is full (2 of 2 items): p/0#1 waits to put for 1.5 s"


def test_an_imbalance_counts_once_enough_is_done() -> None:
    assert kinds(snapshot(channel(consumers=(consumer("a", 7), consumer("b", 0))))) == []
    [one] = findings(snapshot(channel(consumers=(consumer("a", 8), consumer("b", 0)))))
    assert (one.kind, "a did all the work of b (8 and 0)" in one.text) == ("imbalance", True)
    [one] = findings(snapshot(channel(consumers=(consumer("a", 8), consumer("b", 4)))))
    assert "2.0 times" in one.text


def test_workers_that_died_or_are_silent() -> None:
    life = Life(0.0, (worker("a/0", running=False, restarts=1), worker("b/0", heard_s=6.5)))
    peers = (Peer("a/0", 3, "", "", gone=True), Peer("c/0", 4, "", "", gone=True))
    assert kinds(snapshot(life=life, peers=peers)) == [
        ("gone", "a/0"),
        ("silent", "b/0"),
        ("gone", "c/0"),
    ]
    starting = Life(0.0, (worker(running=False),))
    assert kinds(snapshot(life=starting)) == [], "it starts for the first time"


def test_who_waits_long_for_devices() -> None:
    def holder(name: str, since_s: float) -> Holder:
        return Holder(name, ("core:0",), (0,), 1, since_s)

    lock = LockStatistics((holder("a", 70.0),), (holder("b", 65.0), holder("c", 1.0)), 1, 0)
    [one] = findings(snapshot(lock=lock))
    assert one.text == "b waits for core:0 for 65 s, behind a"


def test_the_log_has_what_the_job_told_and_what_began_and_ended() -> None:
    log, full = Log(keep=3), Finding("full", "q", "q is full")
    log.take([Incident(1, 5.0, "died", "a/0", "a/0 died")], [full], 6.0)
    log.take([], [full], 7.0)
    entries = log.take([], [], 8.0)
    assert [(e.number, e.at, e.kind) for e in entries] == [
        (1, 5.0, "died"),
        (2, 6.0, "full"),
        (3, 8.0, "over"),
    ]
    assert entries[-1].text == "q has room again"
    assert len(log.take([], [full], 9.0)) == 3


SPANS = tuple(Span(n, "w/0", "stage", "w.work", n, float(n), n + 0.5) for n in (1, 2, 3))
LIFE = Life(9.0, (worker(rss_bytes=5_000_000, cpu_s=1.5, doing="work", doing_s=2.0),), SPANS)


def test_spans_are_told_once() -> None:
    shown = as_json(snapshot(life=LIFE), after=2)
    assert shown["spans"] == [[3, "w/0", "stage", "w.work", 3, 3.0, 3.5]]
    assert json.loads(json.dumps(shown))["life"]["workers"][0]["rss_bytes"] == 5_000_000


def test_prometheus_and_the_terminal_have_them_too() -> None:
    life = Life(9.0, (worker(restarts=2, running=False),))
    text = exposition(snapshot(life=life))
    assert 'rlinf_worker_restarts_total{worker="w/0"} 2' in text
    assert 'rlinf_worker_running{worker="w/0"} 0' in text
    assert 'rlinf_findings{kind="gone"} 1' in text and 'rlinf_findings{kind="full"} 0' in text
    lines = paint(draw("job", snapshot(life=LIFE)), 120, colours=False)
    assert any("5 MB" in line and "work for 2.0 s" in line for line in lines)
    assert any("iterations 1 to 3" in line for line in lines)
    lines = paint(draw("job", snapshot(life=life)), 120, colours=False)
    assert any("w/0 died and is being started again (restart 2)" in line for line in lines)
