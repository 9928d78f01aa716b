"""The spool on a real file system: what is read again is what was written, whatever happened."""

import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from rlinf.channel import (
    Channel,
    ChannelConfig,
    ChannelServer,
    InvalidConfig,
    SpoolConfig,
    SpoolFailed,
    SpoolFull,
    SpoolUnusable,
)
from rlinf.channel.batching import cargos, shelve
from rlinf.channel.cargo import pack, unpack
from rlinf.channel.hub import Hub
from rlinf.channel.journal import Held, ServerState
from rlinf.channel.messages import ClientId, Close, Delivered, Outcome, Put, Settle, Take
from rlinf.channel.spans import ranges
from rlinf.channel.spool import Spool
from rlinf.channel.testing import Rig, host_with_little_disk
from tests.channel.driver import close

PRODUCER, CONSUMER = ClientId("p/0", 1, 0), ClientId("c/0", 1, 0)


class Server:
    """A hub and a spool, as a channel server has them."""

    def __init__(self, folder: Path, incarnation: int = 1) -> None:
        self.spool = Spool(SpoolConfig(str(folder)))
        self.hub = Hub("channel/0", incarnation=incarnation << 20, durable=True)
        self.hub.load(self.spool.state.channels)
        self.requests = count(1)
        self.hub.create("q", ChannelConfig())
        self.keep()

    def keep(self) -> None:
        records = self.hub.records()
        if records:
            self.spool.write(records)

    def put(self, first: int, values: Sequence[object], keys: Sequence[str | None]) -> None:
        crate = close([(pack(v), 1.0 + n, keys[n]) for n, v in enumerate(values)])
        put = Put(next(self.requests), PRODUCER, first, shelve(crate, "q"))
        self.spool.reserve(sum(run.nbytes for run in put.runs))
        self.hub.step("q", put, 0.0)
        self.keep()

    def take(self, max_items: int) -> tuple[list[int], list[object]]:
        take = Take(next(self.requests), CONSUMER, max_items, wait=False)
        ((_, delivered),) = self.hub.step("q", take, 0.0)
        self.keep()
        assert isinstance(delivered, Delivered)
        items = [unpack(cargo) for run in delivered.runs for cargo in cargos(run)]
        return list(range(delivered.first_tag, delivered.first_tag + len(items))), items

    def settle(self, tags: Sequence[int], outcome: Outcome = Outcome.DONE) -> None:
        self.hub.step("q", Settle(next(self.requests), CONSUMER, ranges(tags), outcome), 0.0)
        self.keep()


def picture(state: ServerState) -> object:
    """A state in plain values, to compare."""
    return [
        (
            channel.name,
            channel.config,
            channel.closed,
            channel.orders,
            {client: (p.next, p.refused) for client, p in channel.producers.items()},
            [
                (order + at, run.key, str(unpack(cargo)))
                for order, run in channel.items
                for at, cargo in enumerate(cargos(run))
            ],
            sum(run.weight for _, run in channel.items),
            {client: tags.ranges() for client, tags in channel.settled.items()},
        )
        for channel in state.channels.values()
    ] + sorted(state.grants.values(), key=lambda held: held.token)


def reread(folder: Path) -> ServerState:
    spool = Spool(SpoolConfig(str(folder)))
    spool.close()
    return spool.state


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    server = Server(tmp_path)
    values = [b"bytes", {"a": [1, "two"]}, np.arange(3), np.arange(10_000), "x" * 5000, None]
    server.put(0, values, ["k", None, None, "k", None, None])
    tags, _ = server.take(2)
    server.settle(tags[:1])
    server.hub.step("q", Close(), 0.0)
    server.keep()
    server.spool.close()
    again = Server(tmp_path, 2)
    queue = again.hub.get("q")
    assert queue.closed and len(queue) == 5, "the leased item is queued again"
    assert queue.expects(PRODUCER) == 6
    _, back = again.take(10)
    for value, expected in zip(back, values[1:], strict=True):
        np.testing.assert_equal(value, expected)


def test_tidying_up_changes_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path)
    rng = random.Random(7)
    number = 0
    for _ in range(60):
        size = rng.randint(1, 4)
        server.put(number, [rng.random() for _ in range(size)], [rng.choice("ab")] * size)
        number += size
        tags, _ = server.take(rng.randint(1, 4))
        server.settle(tags, rng.choice([Outcome.DONE, Outcome.RETURNED, Outcome.REJECTED]))
        if rng.random() < 0.2:
            server.spool.tidy(ServerState(server.hub.save(), {9: Held(9, PRODUCER, ("d",), (1,))}))
    server.spool.tidy(ServerState(server.hub.save(), {9: Held(9, PRODUCER, ("d",), (1,))}))
    size = server.spool.nbytes
    server.spool.close()
    assert [path.name for path in tmp_path.glob("*.log")] == [f"{server.spool._number:06d}.log"]
    first = reread(tmp_path)
    assert picture(first) == picture(ServerState(server.hub.save(), first.grants))
    assert list(first.grants) == [9]
    assert size < 20_000


def test_a_log_that_ends_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    server = Server(folder)
    server.put(0, ["one", "two"], [None, None])
    before = server.spool.nbytes
    server.put(2, ["three"], [None])
    server.spool.close()
    whole = (folder / "000001.log").read_bytes()
    for end in range(before, len(whole)):
        for tail in (b"", bytes(100)):  # cut off, or allocated and never written
            (folder / "000001.log").write_bytes(whole[:end] + tail)
            state = reread(folder)
            complete = (whole[:end] + tail).startswith(whole)  # its last bytes are zeros
            assert state.channels["q"].items.count == (3 if complete else 2)
            assert (folder / "000001.log").stat().st_size == (len(whole) if complete else before)
    (folder / "000001.log").write_bytes(whole)
    assert reread(folder).channels["q"].items.count == 3


def test_damage_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    server = Server(tmp_path)
    start = server.spool.nbytes
    server.put(0, ["one"], [None])
    server.put(1, ["two"], [None])
    server.spool.close()
    path = tmp_path / "000001.log"
    whole = bytearray(path.read_bytes())
    whole[start + 40] ^= 1
    path.write_bytes(whole)
    with pytest.raises(SpoolUnusable, match=rf"damaged at byte {start}"):
        Spool(SpoolConfig(str(tmp_path)))
    assert path.read_bytes() == whole, "nothing was changed"


def test_leftovers_of_an_interrupted_tidying_are_removed(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.put(0, ["one"], [None])
    server.spool.close()
    (tmp_path / "000002.tmp").write_bytes(b"half of it")
    assert reread(tmp_path).channels["q"].items.count == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    first = Spool(SpoolConfig(str(tmp_path)))
    with pytest.raises(SpoolUnusable, match="another server"):
        Spool(SpoolConfig(str(tmp_path)))
    first.close()
    Spool(SpoolConfig(str(tmp_path))).close()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with Rig("inproc") as rig, rig.endpoint("channel/0") as endpoint:
        with pytest.raises(SpoolUnusable, match="file") as caught:
            ChannelServer(endpoint, spool=SpoolConfig(str(tmp_path / "file" / "spool")))
    assert isinstance(caught.value, OSError)


def test_a_disk_that_fails_stops_every_acknowledgement(tmp_path: Path) -> None:
    (tmp_path / "000001.log").symlink_to("/dev/full")
    with (
        Rig("inproc") as rig,
        rig.endpoint("channel/0") as endpoint,
        ChannelServer(endpoint, spool=SpoolConfig(str(tmp_path))),
        rig.endpoint("test/0") as test,
    ):
        for _ in range(2):
            with pytest.raises(SpoolFailed, match="No space left"):
                Channel.create("q", test)


def test_a_full_disk_refuses_puts_whole_and_lets_consumers_work(tmp_path: Path) -> None:
    config = SpoolConfig(str(tmp_path / "spool"))
    item = np.zeros(50_000)  # 400 kB
    with Rig("tcp") as rig, rig.endpoint("test/0") as test:
        with rig.process("channel/0", host_with_little_disk, config, 4_000_000):
            assert test.recv() == "serving"
            channel = Channel.create("q", test, ChannelConfig(put_window_items=0))
            accepted = 0
            with pytest.raises(SpoolFull, match="File too large") as caught:
                for _ in range(20):
                    channel.put(item)
                    accepted += 1
            assert caught.value.lost == 1 and 3 < accepted < 9
            assert channel.qsize() == accepted, "nothing half"
            with pytest.raises(SpoolFull):
                channel.put_many([item, item])
            consumer = channel.ref.open(test)
            for _ in range(accepted):
                assert consumer.get().nbytes == item.nbytes
            consumer.ack()
            channel.put(item)  # there is room again, once what is done is left out
            assert consumer.get().nbytes == item.nbytes
            windowed = Channel.create("w", test)
            lost = put = 0
            flushed = False
            while not flushed:
                try:
                    if put < 20:
                        windowed.put(item)
                        put += 1
                    else:
                        windowed.flush()
                        flushed = True
                except SpoolFull as error:  # of items that had been taken over
                    lost += error.lost
            assert lost and windowed.qsize() + lost == put, "the loss is told to the item"


def test_what_an_acknowledgement_means_is_configured(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="sync"):
        SpoolConfig("x", sync="sometimes")
    with pytest.raises(InvalidConfig, match="tidy_bytes"):
        SpoolConfig("x", tidy_bytes=0)
    with (
        Rig("inproc") as rig,
        rig.endpoint("channel/0") as endpoint,
        ChannelServer(endpoint, spool=SpoolConfig(str(tmp_path), sync="disk")),
        rig.endpoint("test/0") as test,
    ):
        channel = Channel.create("q", test)
        channel.put(1)
        channel.flush()
        assert channel.durability == "disk"
