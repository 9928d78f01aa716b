"""A snapshot as tables for the terminal; about 100 columns wide.

`full`: held bytes or queued items, of the bound. `load`: outstanding weight for its speed, of the
most loaded consumer. `skew`: the most over the least finished weight for its speed. `again`: items
given a second time.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from rlinf.channel.findings import findings
from rlinf.channel.lanes import lanes
from rlinf.channel.life import WorkerLife
from rlinf.channel.snapshot import Rate, Snapshot, blocked, rates
from rlinf.channel.statistics import ChannelStatistics, ConsumerStatistics, ServerStatistics
from rlinf.channel.terminal import Cell, Line, table

WIDTH = 110
"""Where there is no terminal that has one."""
BAR = 8
LONG_S = 5.0
"""A wait that has lasted this long is shown in another colour."""
MOST_CONSUMERS, MOST_WAITS, MOST_ENTRIES = 32, 16, 6

Row = Sequence[str | Sequence[Cell]]


def draw(title: str, snapshot: Snapshot, before: Snapshot | None = None) -> list[Line]:
    """The whole picture; `before` gives the rates."""
    server = snapshot.server
    detail = (
        f"{server.server} up {age(server.up_s)}, answered in {snapshot.answered_s * 1e3:.1f} ms; "
        f"{len(snapshot.peers)} workers"
    )
    lines: list[Line] = [
        [Cell("rlinf-monitor", "bold"), Cell(f"  {title}")],
        [Cell(detail, "dim")],
        *([Cell(f"! {one.text}", "red")] for one in findings(snapshot)),
        *lanes(snapshot.life.spans if snapshot.life is not None else ()),
        *_channels(server.channels, rates(before, snapshot)),
        *_consumers(server.channels),
        *_waits(server.channels),
        *_lock(server),
        *_peers(snapshot),
        *_log(snapshot),
    ]
    return lines


def _channels(channels: Iterable[ChannelStatistics], now: Mapping[str, Rate]) -> list[Line]:
    columns = "channel|policy|>queued|>held|full|>leased|>put/s|>done/s|>in/s|>skew|>again|state"
    return table("Channels", columns, [_channel(one, now[one.name]) for one in channels])


def _channel(channel: ChannelStatistics, rate: Rate) -> Row:
    bound = "" if channel.max_items is None else f" of {channel.max_items:,}"
    full = channel.held_bytes / channel.max_bytes
    if channel.max_items is not None:
        full = max(full, channel.depth / channel.max_items)
    state = Cell("closed", "dim") if channel.closed else Cell("open", "green")
    if channel.waiting_producers:
        state = Cell(f"{channel.waiting_producers} wait to put", "red")
    return (
        channel.name,
        channel.policy,
        f"{channel.depth:,}{bound}",
        size(channel.held_bytes),
        bar(full),
        f"{channel.leased_items:,}",
        count(rate.put_items),
        count(rate.done_items),
        size(rate.put_bytes),
        f"{channel.balance:.2f}" if len(channel.consumers) > 1 else "",
        f"{channel.redelivered_items:,}" if channel.redelivered_items else "",
        (state,),
    )


def _consumers(channels: Iterable[ChannelStatistics]) -> list[Line]:
    rows = [row for channel in channels for row in _consumers_of(channel)]
    title = f"Consumers{_left_out(len(rows), MOST_CONSUMERS)}"
    columns = "consumer|channel|>speed|>leased|>weight|load|>weight/s|>finished|>idle|>again"
    return table(title, columns, rows[:MOST_CONSUMERS]) if rows else []


def _consumers_of(channel: ChannelStatistics) -> Iterable[Row]:
    loads = [one.outstanding_weight / one.capacity for one in channel.consumers]
    most = max(loads, default=0.0) or 1.0
    for one, load in zip(channel.consumers, loads, strict=True):
        yield _consumer(channel.name, one, load / most)


def _consumer(channel: str, one: ConsumerStatistics, load: float) -> Row:
    return (
        one.id,
        channel,
        f"{one.capacity:g}",
        f"{one.leased_items:,}",
        f"{one.outstanding_weight:,.4g}",
        bar(load, warn=2.0),
        count(one.weight_per_s),
        f"{one.finished_weight:,.6g}",
        age(one.idle_s),
        f"{one.redelivered:,}" if one.redelivered else "",
    )


def _waits(channels: Iterable[ChannelStatistics]) -> list[Line]:
    waits = [(w, channel.name) for channel in channels for w in channel.waiting]
    waits.sort(key=lambda row: -row[0].since_s)
    title = f"Waiting{_left_out(len(waits), MOST_WAITS)}"
    rows = [(w.id, f"{w.operation} {name}", _since(w.since_s)) for w, name in waits[:MOST_WAITS]]
    return table(title, "who|for|>since", rows) if rows else []


def _lock(server: ServerStatistics) -> list[Line]:
    lock = server.lock
    rows: list[Row] = [
        (
            ", ".join(one.devices),
            (Cell("holds", "green"),),
            one.id,
            _order(one.order),
            age(one.since_s),
            "",
        )
        for one in lock.holders
    ]
    for wait in blocked(lock):
        one = wait.waiter
        rows.append(
            (
                ", ".join(one.devices),
                (Cell("waits", "yellow"),),
                one.id,
                _order(one.order),
                _since(one.since_s),
                ", ".join(holder.id for holder in wait.behind),
            )
        )
    title = f"Device lock ({lock.grants:,} grants, {lock.lost:,} lost)"
    return table(title, "devices||who|order|>since|behind", rows) if rows else []


def _peers(snapshot: Snapshot) -> list[Line]:
    hosts = list(dict.fromkeys(peer.host for peer in snapshot.peers))
    lives = {one.id: one for one in snapshot.life.workers} if snapshot.life is not None else {}
    known = {peer.id: peer for peer in snapshot.peers}
    rows: list[Row] = []
    for name in dict.fromkeys((*lives, *known)):
        peer, life = known.get(name), lives.get(name)
        on = "" if peer is None else f"host {hosts.index(peer.host)}"
        pid = life.pid if life is not None else peer.pid if peer is not None else 0
        device = peer.device if peer is not None else ""
        rows.append((name, str(pid or ""), on, *_life(life, device)))
    columns = "worker|>pid|on|device|>memory|>processor|>heard|>restarts|does"
    return table("Workers", columns, rows) if rows else []


def _life(life: WorkerLife | None, device: str) -> Row:
    if life is None:
        return (device, "", "", "", "", "")
    return (
        ", ".join(life.devices),
        size(life.rss_bytes),
        age(life.cpu_s),
        f"{age(life.heard_s)} ago" if life.running else "",
        (Cell(f"{life.restarts or ''}", "red"),),
        f"{life.doing} for {age(life.doing_s)}" if life.doing else "",
    )


def _log(snapshot: Snapshot) -> list[Line]:
    rows = [
        (time.strftime("%H:%M:%S", time.localtime(one.at)), one.kind, one.text)
        for one in snapshot.log[-MOST_ENTRIES:]
    ]
    return table("Log", "when|what|", rows) if rows else []


def _left_out(there: int, shown: int) -> str:
    return f" ({there - shown} more are not shown)" if there > shown else ""


def _order(order: tuple[int, ...]) -> str:
    return ".".join(map(str, order))


def _since(seconds: float) -> tuple[Cell]:
    return (Cell(age(seconds), "red" if seconds > LONG_S else ""),)


def bar(part: float, *, warn: float = 0.9) -> tuple[Cell, Cell]:
    """A bar of `BAR` cells, filled up to `part` of 1; red from `warn` on."""
    filled = min(BAR, round(max(part, 0.0) * BAR))
    return Cell("━" * filled, "red" if part >= warn else "cyan"), Cell("─" * (BAR - filled), "dim")


def size(nbytes: float) -> str:
    """Bytes to read: "3.1 MB"; nothing for none."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB"), " ")


def count(number: float) -> str:
    """A number to read: "12.3k"; nothing for none."""
    return _scaled(number, ("", "k", "M", "G"), "")


def _scaled(number: float, units: tuple[str, ...], gap: str) -> str:
    if not number:
        return ""
    for unit in units:
        if abs(number) < 1000 or unit == units[-1]:
            break
        number /= 1000
    whole = number >= 100 or (unit in ("", "B") and number == int(number))
    digits = f"{number:.0f}" if whole else f"{number:.3g}"
    return f"{digits}{gap}{unit}".strip()


def age(seconds: float) -> str:
    """A duration to read: "3.2 s", "4 min 5 s", "2 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
