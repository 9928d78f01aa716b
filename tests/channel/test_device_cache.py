"""Items that stay on the accelerator: the tiers alone, with a fake device, and with a real one."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf.channel import Channel, ChannelConfig, ChannelServer, InvalidConfig, ItemsLost
from rlinf.channel.session import session_of
from rlinf.channel.testing import FakeMemory, FakeTensor, Rig
from rlinf.channel.tiers import Move, Tier, Tiers
from rlinf.comm import Endpoint
from rlinf.comm.testing import eventually

DEVICE, HOST, DISK = Tier
SIZE = 10


def drain(tiers: Tiers) -> list[Move]:
    moves: list[Move] = []
    while step := tiers.fetch():
        moves += step
    return moves


def test_what_is_needed_soonest_is_on_the_device() -> None:
    tiers = Tiers(3 * SIZE, 2 * SIZE, disk=True)
    for number in range(7):
        tiers.put(number, SIZE)
    assert [tiers.where(n) for n in range(7)] == [DEVICE] * 3 + [HOST] * 2 + [DISK] * 2
    assert tiers.take(0) == [] and tiers.hits == 1
    tiers.done(0)
    assert drain(tiers) == [Move(3, HOST, DEVICE), Move(5, DISK, HOST)]


def test_a_miss_makes_room_by_what_is_needed_last() -> None:
    tiers = Tiers(2 * SIZE)
    for number in range(4):
        tiers.put(number, SIZE)
    assert tiers.take(3) == [Move(3, HOST, DEVICE)] or tiers.where(3) is DEVICE
    assert (tiers.hits, tiers.misses) == (0, 1)
    tiers = Tiers(2 * SIZE)
    for number in range(4):
        tiers.put(number, SIZE)
    tiers.done(0)
    drain(tiers)
    assert [tiers.where(n) for n in (1, 2, 3)] == [DEVICE, DEVICE, HOST]


def test_without_a_disk_the_host_takes_what_has_no_room() -> None:
    tiers = Tiers(SIZE, SIZE)
    for number in range(5):
        tiers.put(number, SIZE)
    assert [tiers.where(n) for n in range(5)] == [DEVICE] + [HOST] * 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("disk", [False, True])
def test_a_fifo_workload_three_times_the_cache_is_hit(seed: int, disk: bool) -> None:
    rng = random.Random(seed)
    room = 100 * SIZE
    tiers = Tiers(room, room if disk else None, disk=disk)
    put = done = 0
    waiting: list[int] = []
    while done < 1000:
        while put < 1000 and sum(tiers.used_bytes(tier) for tier in Tier) < 3 * room:
            tiers.put(put, rng.randint(SIZE // 2, 2 * SIZE))
            waiting.append(put)
            put += 1
        working = [waiting.pop(0) for _ in range(min(rng.randint(1, 4), len(waiting)))]
        for number in working:
            tiers.take(number)
        rng.shuffle(working)
        for number in working:
            tiers.done(number)
            drain(tiers)
        assert tiers.used_bytes(DEVICE) <= room
        done += len(working)
    assert tiers.hit_rate >= 0.95
    assert len(tiers) == 0 and not any(tiers.used_bytes(tier) for tier in Tier)


# With a fake device behind a real channel


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("tcp") as rig:
        yield rig


@pytest.fixture
def server(rig: Rig) -> Iterator[ChannelServer]:
    with rig.server() as server:
        yield server


@pytest.fixture
def here(rig: Rig, server: ChannelServer) -> Iterator[Endpoint]:
    with rig.endpoint("test/0") as endpoint:
        session_of(endpoint).memory = FakeMemory(1000)
        yield endpoint


def staying(**config: object) -> ChannelConfig:
    return ChannelConfig(offload_to_cpu=False, **config)  # type: ignore[arg-type]


def test_an_item_stays_on_the_device_in_its_process(here: Endpoint) -> None:
    channel = Channel.create("stay", here, staying())
    tensor = FakeTensor(7, 100)
    channel.put({"tokens": [tensor], "text": "hello"})
    channel.put("an item without a tensor travels as ever")
    consumer = channel.ref.open(here)
    got = consumer.get()
    assert got["tokens"][0] is tensor and got["text"] == "hello", "no copy was made"
    assert channel.statistics().held_bytes >= 100, "it counts as many bytes as it has"
    assert consumer.get().startswith("an item")
    (cache,) = session_of(here).caches.values()
    eventually(lambda: len(cache) == 0)


def test_the_channel_keeps_the_device_within_its_ratio(
    here: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_GPU_CACHE_RATIO", "0.5")
    config = staying(device_cache=200, host_cache=100, cache_folder=str(tmp_path / "cache"))
    channel = Channel.create("ratio", here, config)
    for number in range(30):
        channel.put(FakeTensor(number, 10))
    channel.flush()
    (cache,) = session_of(here).caches.values()
    assert len(list((tmp_path / "cache").iterdir())) == 10, "a third is on the disk"
    consumer = channel.ref.open(here)
    for number in range(30):
        item = consumer.get()
        assert (item.value, item.on_device) == (number, True)
        consumer.ack()
        left = 29 - number
        eventually(lambda left=left: len(cache) <= left)
        fetched = threading.Event()
        session_of(here).soon(cache.fetch)
        session_of(here).soon(fetched.set)
        assert fetched.wait(10.0), "the consumer works meanwhile"
    assert channel.statistics().hit_rate == cache.hit_rate >= 0.95
    assert consumer.statistics().hit_rate is None, "it has put nothing"
    assert not list((tmp_path / "cache").iterdir())


def test_another_process_redeems_the_claim_and_a_dead_one_is_named(
    rig: Rig, here: Endpoint
) -> None:
    def produce(endpoint: Endpoint) -> None:
        session_of(endpoint).memory = FakeMemory(1000)
        channel = Channel.connect("far", endpoint)
        for number in range(3):
            channel.put(FakeTensor(number, 10))
        channel.flush()
        endpoint.send("put", "test/0")
        signal.pause()

    channel = Channel.create("far", here, staying())
    with rig.process("producer/0", produce) as process:
        assert here.recv() == "put"
        assert channel.get().value == 0
        with channel.lease() as item:
            assert item.value == 1
        process.kill()
        assert process.join() == -signal.SIGKILL
        with pytest.raises(ItemsLost, match="producer/0"):
            channel.get()
    assert channel.statistics().rejected_items == 1


def test_a_put_that_is_refused_leaves_nothing_behind(here: Endpoint) -> None:
    channel = Channel.create("full", here, staying(max_items=1))
    channel.put(FakeTensor(0, 10))
    with pytest.raises(TimeoutError):
        channel.put(FakeTensor(1, 10), timeout=0.05)
    (cache,) = session_of(here).caches.values()
    assert len(cache) == 1


@pytest.mark.parametrize("ratio", ["0", "1.5", "much"])
def test_a_ratio_that_makes_no_sense_is_refused(
    ratio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_GPU_CACHE_RATIO", ratio)
    with pytest.raises(InvalidConfig, match="RLINF_GPU_CACHE_RATIO"):
        ChannelConfig(device_cache="1GB").device_cache_bytes(0)


def test_torch_items_park_on_the_host_and_on_the_disk(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from rlinf.channel.torch_memory import TorchMemory

    memory = TorchMemory()
    item = {"a": torch.arange(5.0), "b": [torch.ones(2, dtype=torch.bfloat16), "x"]}
    assert memory.device_bytes(item) == 0, "on the host already"
    meta = {"a": torch.empty(5, device="meta")}
    assert memory.device_bytes(meta) == 20
    own = memory.own(item)
    item["a"].zero_()
    path = memory.to_disk(memory.to_host(own), tmp_path / "sub" / "item")
    back = memory.to_device(memory.from_disk(path))
    assert torch.equal(back["a"], torch.arange(5.0)) and back["b"][1] == "x"
    assert not path.exists()


@pytest.mark.gpu
def test_a_real_device_is_hit_on_three_times_its_cache() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: moves real tensors between it, pinned memory and disk")
    count, nbytes = 96, 1 << 22
    with Rig("inproc") as rig, rig.server(), rig.endpoint("test/0") as here:
        ratio = float(os.environ.get("RLINF_GPU_CACHE_RATIO", "0.8"))
        config = staying(device_cache=int(count / 3 * nbytes / ratio) + nbytes)
        channel = Channel.create("gpu", here, config)
        for number in range(count):
            channel.put(torch.full((nbytes // 4,), float(number), device="cuda"))
        channel.flush()
        (cache,) = session_of(here).caches.values()
        consumer = channel.ref.open(here)
        for number in range(count):
            item = consumer.get()
            assert item.device.type == "cuda" and bool((item == number).all())
            consumer.ack()
            eventually(lambda number=number: len(cache) <= count - 1 - number)
            session_of(here).soon(cache.fetch)
        assert cache.hit_rate >= 0.95
