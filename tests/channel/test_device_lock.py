"""The device lock between real workers: order, exclusion, and holders that die."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from rlinf.channel import (
    ChannelConfig,
    ChannelServer,
    DeviceLock,
    InvalidConfig,
    LeaseLost,
    LockTimeout,
)
from rlinf.channel.testing import Rig
from rlinf.comm import Endpoint
from rlinf.comm.testing import eventually


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("shm") as rig:
        yield rig


@pytest.fixture(scope="module")
def server(rig: Rig) -> Iterator[ChannelServer]:
    with rig.server(config=ChannelConfig(lease_s=1.0)) as server:
        yield server


@pytest.fixture
def test(rig: Rig, server: ChannelServer) -> Iterator[Endpoint]:
    with rig.endpoint("test/0") as endpoint:
        yield endpoint


def hold_and_sleep(endpoint: Endpoint, devices: list[str]) -> None:
    with DeviceLock(endpoint, devices).hold((0, 0)) as grant:
        endpoint.send(grant.token, "test/0")
        signal.pause()


def test_one_holds_at_a_time(rig: Rig, test: Endpoint) -> None:
    inside, worst, turns = [0], [0], 20

    def take_turns(endpoint: Endpoint) -> None:
        lock = DeviceLock(endpoint, ["core:0", "core:1"])
        for turn in range(turns):
            with lock.hold((turn, 0)):
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                inside[0] -= 1

    with rig.endpoint("a/0") as a, rig.endpoint("b/0") as b:
        threads = [threading.Thread(target=take_turns, args=(e,)) for e in (a, b, test)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
    assert worst[0] == 1
    assert DeviceLock(test, ["core:0"]).statistics().holders == ()


def test_upstream_goes_first(rig: Rig, server: ChannelServer, test: Endpoint) -> None:
    order: list[tuple[int, int]] = []

    def wait_turn(endpoint: Endpoint, mine: tuple[int, int]) -> None:
        with DeviceLock(endpoint, ["core:0"]).hold(mine):
            order.append(mine)

    def waiting() -> int:
        return len(server.statistics().lock.waiters)

    wanted = [(1, 1), (0, 2), (1, 0), (0, 1)]
    threads: list[threading.Thread] = []
    with DeviceLock(test, ["core:0"]).hold((0, 0)):
        for count, mine in enumerate(wanted, start=1):
            threads.append(threading.Thread(target=wait_turn, args=(test, mine)))
            threads[-1].start()
            eventually(lambda count=count: waiting() == count)
        line = [waiter.order for waiter in server.statistics().lock.waiters]
        assert line == sorted(wanted), "every waiter can be seen, in its turn"
    for thread in threads:
        thread.join(10.0)
    assert order == sorted(wanted)


def test_other_devices_are_not_waited_for(test: Endpoint) -> None:
    with (
        DeviceLock(test, ["core:0"]).hold((0, 0)),
        DeviceLock(test, ["core:1"]).hold((0, 1), timeout=5.0) as grant,
    ):
        assert grant.devices == frozenset({"core:1"})


def test_who_waits_in_vain_is_told_who_holds(test: Endpoint) -> None:
    with (
        DeviceLock(test, ["core:0", "core:1"]).hold((3, 1)),
        pytest.raises(LockTimeout, match=r"test/0#\d+ \(core:0, core:1; order 3\.1") as caught,
        DeviceLock(test, ["core:1", "core:2"]).hold((3, 2), timeout=0.2),
    ):
        pass
    assert caught.value.devices == ("core:1", "core:2")
    assert 0.2 <= caught.value.timeout_s < 2.0


def test_s12_a_dead_holders_lock_is_released(rig: Rig, test: Endpoint) -> None:
    with rig.process("holder/0", hold_and_sleep, ["core:0"]) as process:
        token = test.recv()
        process.kill()
        with DeviceLock(test, ["core:0"]).hold((9, 9), timeout=10.0) as grant:
            assert grant.token > token, "the fence has moved"


def test_s12_a_stopped_holders_lock_is_released_by_its_lease(rig: Rig, test: Endpoint) -> None:
    with rig.process("holder/0", hold_and_sleep, ["core:0"]) as process:
        test.recv()
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with DeviceLock(test, ["core:0"]).hold((9, 9), timeout=10.0):
            assert time.monotonic() - started < 5.0


def test_a_living_holder_keeps_the_lock(test: Endpoint) -> None:
    with (
        DeviceLock(test, ["core:0"]).hold((0, 0)),
        pytest.raises(LockTimeout),
        DeviceLock(test, ["core:0"]).hold((0, 1), timeout=2.5),
    ):
        pass


def test_a_holder_that_lost_its_grant_is_told(test: Endpoint) -> None:
    lock = DeviceLock(test, ["core:0"])
    with pytest.raises(LeaseLost), lock.hold((0, 0)):
        lock._token = None  # as if this process had been stopped: it renews no more
        with DeviceLock(test, ["core:0"]).hold((0, 1), timeout=10.0):
            pass


def test_a_grant_that_comes_too_late_goes_back(rig: Rig, test: Endpoint) -> None:
    with DeviceLock(test, ["core:0"]).hold((0, 0)):
        for _ in range(3):
            with pytest.raises(LockTimeout), DeviceLock(test, ["core:0"]).hold((0, 1), timeout=0.0):
                pass
    with DeviceLock(test, ["core:0"]).hold((0, 1), timeout=5.0):
        pass


@pytest.mark.parametrize("devices", [[], "core:0"])
def test_devices_are_a_set_of_names(test: Endpoint, devices: object) -> None:
    with pytest.raises(InvalidConfig, match="set of device names"):
        DeviceLock(test, devices)
