"""A snapshot as tables for the terminal, of 100 columns and more. Needs rich (extra `monitor`).

`full`: held bytes or queued items, of the bound. `load`: outstanding weight for its speed,
of the most loaded consumer. `skew`: the most over the least finished weight for its speed.
"""

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rlinf.channel.snapshot import Rate, Snapshot, blocked, rates
from rlinf.channel.statistics import ChannelStatistics, ConsumerStatistics

WIDTH = 110
"""Where there is no terminal that has one."""
BAR = 8
LONG_S = 5.0
"""A wait that has lasted this long is shown in another colour."""
MOST_CONSUMERS, MOST_WAITS = 32, 16

Cell = str | Text
Row = tuple[Cell, ...]


def draw(title: str, snapshot: Snapshot, before: Snapshot | None = None) -> RenderableType:
    """The whole picture."""
    server, now = snapshot.server, rates(before, snapshot)
    head = Text.assemble(
        ("rlinf-monitor", "bold"),
        f"  {title}  ",
        (
            f"{server.server} up {age(server.up_s)}, answered in "
            f"{snapshot.answered_s * 1e3:.1f} ms; {len(snapshot.peers)} workers",
            "dim",
        ),
    )
    parts: list[RenderableType] = [head, _channels(server.channels, now)]
    consumers = [(c.name, one) for c in server.channels for one in c.consumers]
    if consumers:
        parts.append(_consumers(server.channels, consumers))
    waits = [
        (w.id, f"{w.operation} {c.name}", w.since_s) for c in server.channels for w in c.waiting
    ]
    if waits:
        parts.append(_waits(sorted(waits, key=lambda row: -row[2])))
    if server.lock.holders or server.lock.waiters:
        parts.append(_lock(snapshot))
    if snapshot.peers:
        parts.append(_peers(snapshot))
    return Group(*parts)


def _table(title: str, columns: str, rows: Iterable[Row]) -> Table:
    """Columns are named left-aligned, or right-aligned with a `>` before the name."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns.split("|"):
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"),
            justify="right" if right else "left",
            header_style="dim",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _channels(channels: Iterable[ChannelStatistics], now: Mapping[str, Rate]) -> Table:
    columns = "channel|policy|>queued|>held|full|>leased|>put/s|>done/s|>in/s|>skew|>again|state"
    return _table("Channels", columns, [_channel(one, now[one.name]) for one in channels])


def _channel(channel: ChannelStatistics, rate: Rate) -> Row:
    bound = "" if channel.max_items is None else f" of {channel.max_items:,}"
    full = channel.held_bytes / channel.max_bytes
    if channel.max_items is not None:
        full = max(full, channel.depth / channel.max_items)
    state = "closed" if channel.closed else "open"
    if channel.waiting_producers:
        state = f"{channel.waiting_producers} wait to put"
    return (
        channel.name,
        channel.policy,
        f"{channel.depth:,}{bound}",
        size(channel.held_bytes),
        bar(full),
        f"{channel.leased_items:,}",
        count(rate.put_items),
        count(rate.done_items),
        f"{size(rate.put_bytes)}",
        f"{channel.balance:.2f}" if len(channel.consumers) > 1 else "",
        f"{channel.redelivered_items:,}" if channel.redelivered_items else "",
        Text(state, "red" if channel.waiting_producers else "dim" if channel.closed else "green"),
    )


def _consumers(
    channels: Iterable[ChannelStatistics], rows: list[tuple[str, ConsumerStatistics]]
) -> Table:
    most = {
        c.name: max((x.outstanding_weight / x.capacity for x in c.consumers), default=0.0)
        for c in channels
    }

    def row(name: str, one: ConsumerStatistics) -> Row:
        load = one.outstanding_weight / one.capacity
        return (
            one.id,
            name,
            f"{one.capacity:g}",
            f"{one.leased_items:,}",
            f"{one.outstanding_weight:,.4g}",
            bar(load / most[name] if most[name] else 0.0, warn=2.0),
            count(one.weight_per_s),
            f"{one.finished_weight:,.6g}",
            age(one.idle_s),
            f"{one.redelivered:,}" if one.redelivered else "",
        )

    columns = "consumer|channel|>speed|>leased|>weight|load|>weight/s|>finished|>idle|>again"
    title = f"Consumers{_left_out(len(rows), MOST_CONSUMERS)}"
    return _table(title, columns, [row(*one) for one in rows[:MOST_CONSUMERS]])


def _waits(rows: list[tuple[str, str, float]]) -> Table:
    title = f"Waiting{_left_out(len(rows), MOST_WAITS)}"
    shown = [(who, what, _since(since)) for who, what, since in rows[:MOST_WAITS]]
    return _table(title, "who|for|>since", shown)


def _lock(snapshot: Snapshot) -> Table:
    lock = snapshot.server.lock
    rows: list[Row] = [
        (
            ", ".join(one.devices),
            Text("holds", "green"),
            one.id,
            _order(one.order),
            age(one.since_s),
            "",
        )
        for one in lock.holders
    ]
    for wait in blocked(lock):
        one, behind = wait.waiter, ", ".join(holder.id for holder in wait.behind)
        state = Text("waits", "yellow")
        rows.append(
            (", ".join(one.devices), state, one.id, _order(one.order), _since(one.since_s), behind)
        )
    title = f"Device lock ({lock.grants:,} grants, {lock.lost:,} lost)"
    return _table(title, "devices||who|order|>since|behind", rows)


def _peers(snapshot: Snapshot) -> Table:
    hosts = {
        host: number for number, host in enumerate(dict.fromkeys(p.host for p in snapshot.peers))
    }
    rows = [(p.id, str(p.pid), f"host {hosts[p.host]}", p.device) for p in snapshot.peers]
    return _table("Workers", "worker|>pid|on|device", rows)


def _left_out(there: int, shown: int) -> str:
    return f" ({there - shown} more are not shown)" if there > shown else ""


def _order(order: tuple[int, ...]) -> str:
    return ".".join(map(str, order))


def _since(seconds: float) -> Text:
    return Text(age(seconds), "red" if seconds > LONG_S else "")


def bar(part: float, *, warn: float = 0.9) -> Text:
    """A bar of `BAR` cells, filled up to `part` of 1; red from `warn` on."""
    filled = min(BAR, round(max(part, 0.0) * BAR))
    style = "red" if part >= warn else "cyan"
    return Text.assemble(("━" * filled, style), ("─" * (BAR - filled), "dim"))


def size(nbytes: float) -> str:
    """Bytes to read: "3.1 MB"."""
    return _scaled(nbytes, 1000.0, ("B", "kB", "MB", "GB", "TB"), " ")


def count(number: float) -> str:
    """A number to read: "12.3k"."""
    return _scaled(number, 1000.0, ("", "k", "M", "G"), "")


def _scaled(number: float, base: float, units: tuple[str, ...], gap: str) -> str:
    if not number:
        return ""
    for unit in units:
        if abs(number) < base or unit == units[-1]:
            break
        number /= base
    whole = number >= 100 or (not unit and number == int(number))
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
