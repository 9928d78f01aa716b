"""A process struck at each step of the protocol: killed, stopped, or by an exception.

The blow falls at an event of the victim's own endpoint, just before its n-th message leaves or just
after the n-th has arrived, so no step is missed and nothing depends on time. What became of the
victim is looked at in the process table.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf.channel import (
    Channel,
    ChannelConfig,
    ChannelError,
    ChannelServer,
    LeaseLost,
    ServerLost,
    SpoolConfig,
)
from rlinf.channel.testing import Rig, host
from rlinf.comm import Endpoint, Event, Received, Sent
from rlinf.comm.testing import PeerProcess, eventually

COUNT = 6
START_S = 90.0
"""For a process to begin, on a machine that is busy."""
KILL, STOP, RAISE = "SIGKILL", "SIGSTOP", "exception"
CONFIG = ChannelConfig(lease_s=1.0, put_window_items=0, prefetch_items=1, reconnect_s=START_S)

STEPS = range(1, 9)
FEW = {("shm", KILL, 3), ("shm", STOP, 4), ("shm", RAISE, 5)}
CASES = [
    pytest.param(
        transport, blow, step, marks=[] if (transport, blow, step) in FEW else pytest.mark.slow
    )
    for transport in ("shm", "tcp")
    for blow in (KILL, STOP, RAISE)
    for step in STEPS
]


class Blow:
    """A sink that strikes its own process at the n-th message to or from a peer."""

    def __init__(self, endpoint: Endpoint, peer: str, kind: str, step: int) -> None:
        self._peer, self._kind, self._left = peer, kind, step
        self.struck = threading.Event()
        endpoint.add_sink(self)

    def look(self) -> None:
        """Raise if it has struck: an exception of the program, between two of its calls."""
        if self.struck.is_set():
            raise RuntimeError("struck")

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Sent | Received) or str(event.peer) != self._peer:
            return
        self._left -= 1
        if self._left == 0:
            if self._kind == RAISE:
                self.struck.set()
            else:
                os.kill(os.getpid(), getattr(signal, self._kind))


def produce(endpoint: Endpoint, kind: str, step: int) -> None:
    channel = Channel.connect("in", endpoint)
    endpoint.send("ready", "test/0")
    blow = Blow(endpoint, "channel/0", kind, step)
    for number in range(COUNT):
        channel.put(number)
        blow.look()


def consume(endpoint: Endpoint, kind: str, step: int) -> None:
    source, target = Channel.connect("in", endpoint), Channel.connect("out", endpoint)
    blow = None
    if kind:
        endpoint.send("ready", "test/0")
        blow = Blow(endpoint, "channel/0", kind, step)
    while True:
        try:
            with source.lease_batch(max_items=2) as lease:
                if blow is not None:
                    blow.look()  # within the lease: its items go back
                lease.commit([(item, 1.0) for item in lease], target)
        except LeaseLost:
            continue  # the outputs are dropped
        except ChannelError:
            return  # closed


def serve(endpoint: Endpoint, spool: SpoolConfig, kind: str, step: int) -> None:
    with ChannelServer(endpoint, spool=spool):
        endpoint.send("serving", "test/0")
        blow = Blow(endpoint, "worker/0", kind, step)
        if kind == RAISE:
            blow.struck.wait(START_S)
            blow.look()
        endpoint.recv("test/0", timeout=None)


def state_of(process: PeerProcess) -> str:
    """The state letter of a process: R or S runs, T is stopped, Z has ended."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def await_blow(process: PeerProcess, kind: str) -> None:
    """Wait until the victim is what the blow makes of it."""
    if kind == STOP:
        eventually(lambda: state_of(process) == "T")
    elif kind == KILL:
        assert process.join() == -signal.SIGKILL
    else:
        eventually(lambda: state_of(process) in ("Z", "gone"))
        assert process.join() != 0


@pytest.fixture
def rig(transport: str) -> Iterator[Rig]:
    with Rig(transport) as rig:
        yield rig


@pytest.fixture
def test(rig: Rig) -> Iterator[Endpoint]:
    with rig.endpoint("test/0") as endpoint:
        yield endpoint


@pytest.mark.parametrize(("transport", "blow", "step"), CASES)
def test_a_producer_struck_at_each_step_leaves_a_whole_beginning(
    rig: Rig, test: Endpoint, blow: str, step: int
) -> None:
    with rig.server():
        channel = Channel.create("in", test, CONFIG)
        with rig.process("producer/0", produce, blow, step) as victim:
            assert test.recv(timeout=START_S) == "ready"
            await_blow(victim, blow)
            before = channel.statistics().put_items
            assert before <= (step + 1) // 2, "one item for each pair of messages"
            if blow == STOP:
                os.kill(victim.pid, signal.SIGCONT)
                assert victim.join() == 0
                before = COUNT
        channel.close()
        items = list(channel)
        assert items == list(range(len(items))) and len(items) >= before


@pytest.mark.parametrize(("transport", "blow", "step"), CASES)
def test_a_consumer_struck_at_each_step_loses_and_repeats_nothing(
    rig: Rig, test: Endpoint, blow: str, step: int
) -> None:
    with rig.server():
        source, target = Channel.create("in", test, CONFIG), Channel.create("out", test, CONFIG)
        source.put_many(range(4 * COUNT))
        source.close()
        with rig.process("consumer/0", consume, blow, step) as victim:
            assert test.recv(timeout=START_S) == "ready"
            await_blow(victim, blow)
            helper = threading.Thread(target=consume, args=(test, "", 0))
            helper.start()
            helper.join(START_S)
            assert not helper.is_alive()
            assert source.statistics().acknowledged_items == 4 * COUNT
            if blow == STOP:
                os.kill(victim.pid, signal.SIGCONT)
                assert victim.join() == 0, "it is told, drops its outputs, and ends"
        target.close()
        assert Counter(target) == Counter(range(4 * COUNT))


@pytest.mark.parametrize(("transport", "blow", "step"), CASES)
def test_a_server_struck_at_each_step_goes_on_where_it_was(
    rig: Rig, test: Endpoint, blow: str, step: int, tmp_path: Path
) -> None:
    spool = SpoolConfig(str(tmp_path / "spool"))

    def work(ends: list[object]) -> None:
        with rig.endpoint("worker/0", connection_timeout_s=START_S) as mine:
            try:
                ends.append(pipeline(mine))
            except ServerLost as error:
                ends.append(error)

    ends: list[object] = []
    worker = threading.Thread(target=work, args=(ends,))
    with rig.process("channel/0", serve, spool, blow, 6 + step) as victim:
        assert test.recv(timeout=START_S) == "serving"
        worker.start()
        await_blow(victim, blow)
        if blow == STOP:
            assert worker.is_alive(), "it waits"
            os.kill(victim.pid, signal.SIGCONT)
            worker.join(START_S)
    if blow == STOP:
        assert ends == [list(range(COUNT))]
        return
    with rig.process("channel/0", host, None, spool):
        assert test.recv(timeout=START_S) == "serving"
        worker.join(START_S)
        if blow == KILL:
            assert ends == [list(range(COUNT))], "it has not even noticed"
        else:  # the program ended in order and said so; what it had acknowledged is here
            assert isinstance(ends[0], ServerLost)
            state = Channel.create("in", test, CONFIG).statistics()
            assert state.put_items - state.acknowledged_items == state.depth


def pipeline(endpoint: Endpoint) -> list[object]:
    """Put, commit from one channel to another, and get, one item after the other."""
    source = Channel.create("in", endpoint, CONFIG)
    target = Channel.create("out", endpoint, CONFIG)
    seen: list[object] = []
    for number in range(COUNT):
        source.put(number)
        while True:
            try:
                with source.lease_batch(max_items=1) as lease:
                    lease.commit([(lease[0], 1.0)], target)
                break
            except LeaseLost:
                continue
        while True:
            item = target.get()
            try:
                target.ack()
                break
            except LeaseLost:  # it ended with its server, and the item comes again
                continue
        seen.append(item)
    return seen
