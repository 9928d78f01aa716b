"""What stays on the devices between two grants of the device lock, and when it leaves."""

import threading
from collections.abc import Iterator

import pytest

from rlinf.channel import ChannelConfig, ChannelServer, DeviceLock, LockTimeout
from rlinf.channel.testing import Rig
from rlinf.comm import Endpoint
from rlinf.comm.testing import eventually

DEVICES = ["core:0"]


class Model:
    """A residency that notes what happens to it."""

    def __init__(self, nbytes: int) -> None:
        self.size = nbytes
        self.there = False
        self.moves: list[str] = []

    def onload(self) -> None:
        assert not self.there
        self.there = True
        self.moves.append("onload")

    def offload(self) -> None:
        self.there = False
        self.moves.append("offload")

    def resident_bytes(self) -> int:
        return self.size if self.there else 0


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("shm") as rig:
        yield rig


@pytest.fixture
def server(rig: Rig) -> Iterator[ChannelServer]:
    with rig.server(config=ChannelConfig(lease_s=1.0)) as server:
        yield server


@pytest.fixture
def two(rig: Rig, server: ChannelServer) -> Iterator[tuple[Endpoint, Endpoint]]:
    with rig.endpoint("a/0") as a, rig.endpoint("b/0") as b:
        yield a, b


def take_turns(*locks: DeviceLock, rounds: int = 3) -> None:
    for turn in range(rounds):
        for place, lock in enumerate(locks):
            with lock.hold((turn, place), timeout=10.0):
                pass


def test_enter_is_onload_and_exit_is_offload(two: tuple[Endpoint, Endpoint]) -> None:
    model = Model(10)
    lock = DeviceLock(two[0], DEVICES, residency=model)
    for turn in range(2):
        with lock.hold((turn, 0)):
            assert model.there
        assert not model.there
    with pytest.raises(ZeroDivisionError), lock.hold((2, 0)):
        raise ZeroDivisionError
    assert model.moves == ["onload", "offload"] * 3


def test_two_that_fit_together_do_not_swap(two: tuple[Endpoint, Endpoint]) -> None:
    models = Model(10), Model(20)
    rows = zip(two, models, strict=True)
    first, second = (DeviceLock(e, DEVICES, residency=m, room_bytes=30) for e, m in rows)
    take_turns(first, second)
    # What the second needs is not known the first time, so the first makes room for it.
    assert models[0].moves == ["onload", "offload", "onload"]
    assert models[1].moves == ["onload"]
    assert len(first.statistics().residents) == 2


def test_two_that_do_not_fit_swap_each_time(two: tuple[Endpoint, Endpoint]) -> None:
    models = Model(10), Model(21)
    rows = zip(two, models, strict=True)
    take_turns(*(DeviceLock(e, DEVICES, residency=m, room_bytes=30) for e, m in rows))
    assert models[0].moves == ["onload", "offload"] * 3
    assert models[1].moves == ["onload", "offload"] * 2 + ["onload"]


def test_one_that_says_nothing_of_its_size_has_the_devices_alone(
    two: tuple[Endpoint, Endpoint],
) -> None:
    model = Model(10)
    take_turns(DeviceLock(two[0], DEVICES, residency=model, room_bytes=30), rounds=2)
    assert model.moves == ["onload"]
    with DeviceLock(two[1], DEVICES).hold((2, 0), timeout=10.0):
        assert not model.there


def test_one_that_stays_is_named_to_those_who_wait_and_dies_with_its_process(
    rig: Rig, two: tuple[Endpoint, Endpoint]
) -> None:
    def stay(endpoint: Endpoint) -> None:
        model = Model(10)
        model.offload = threading.Event().wait  # type: ignore[method-assign, assignment]
        take_turns(DeviceLock(endpoint, DEVICES, residency=model, room_bytes=30), rounds=1)
        endpoint.send("stays", "a/0")
        threading.Event().wait()

    lock = DeviceLock(two[0], DEVICES)
    with rig.process("c/0", stay) as process:
        two[0].recv()
        with pytest.raises(LockTimeout, match="c/0"), lock.hold((1, 0), timeout=0.2):
            pass
        process.kill()
        with lock.hold((2, 0), timeout=10.0):
            assert lock.statistics().residents == ()


def test_a_server_that_dies_knows_of_nobody_so_all_leave(rig: Rig) -> None:
    model = Model(10)
    with rig.endpoint("a/0") as here:
        with rig.server("channel/7"):
            lock = DeviceLock(here, DEVICES, server="channel/7", residency=model, room_bytes=30)
            take_turns(lock, rounds=1)
            assert model.there
        eventually(lambda: not model.there)
