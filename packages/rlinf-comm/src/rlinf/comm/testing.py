"""For tests of this package, of plug-in transports and of the floors above.

`TransportTests` is the conformance suite: a transport's own tests are

    class TestMine(TransportTests):
        transport = "mine"

Peers are real processes (`PeerProcess`), or threads where the transport stays in one process.
"""

import os
import queue
import signal
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from rlinf.comm.config import CommConfig
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import PeerLost, Timeout
from rlinf.comm.handle import Handle
from rlinf.comm.plugins import transports
from rlinf.comm.registry_server import RegistryServer
from rlinf.comm.rehearsal import (
    FakeClock,
    LossyTransport,
    PeerProcess,
    PeerThread,
    Program,
    eventually,
    worker,
)

__all__ = [
    "ConformanceBase",
    "DeliveryTests",
    "FailureTests",
    "FakeClock",
    "LossyTransport",
    "OwnershipTests",
    "PeerProcess",
    "PeerThread",
    "TransportTests",
    "eventually",
    "worker",
]


def parrot(endpoint: Endpoint, to: str = "test/0") -> None:
    """Send back what comes, with its tag plus 100, until None comes; tags 0 to 3 are heard."""
    heard: queue.SimpleQueue[tuple[int, Handle[Any]]] = queue.SimpleQueue()

    def listen(tag: int) -> None:
        handle = endpoint.irecv(to, tag=tag, timeout=None)
        handle.add_done_callback(lambda done: heard.put((tag, done)))

    for tag in range(4):
        listen(tag)
    while True:
        tag, handle = heard.get()
        obj = handle.result()
        del handle
        if obj is None:
            return
        endpoint.send(obj, to, tag=tag + 100)
        del obj
        listen(tag)


def first_speaker(endpoint: Endpoint, nbytes: int) -> None:
    """Send before receiving."""
    endpoint.send(np.full(nbytes, 1, np.uint8), "test/0")
    assert endpoint.recv("test/0").nbytes == nbytes
    endpoint.send("done", "test/0", tag=1)


def counter(endpoint: Endpoint, count: int) -> None:
    """Send numbers, small and large ones mixed, then wait to be told to end."""
    for number in range(count):
        obj: object = np.full(100_000, number) if number % 7 == 0 else number
        endpoint.send(obj, "test/0")
    endpoint.recv("test/0")


def die_before_sending(endpoint: Endpoint) -> None:
    """Connect, then be killed."""
    endpoint.send("ready", "test/0", tag=1)
    endpoint.recv("test/0", tag=1)
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_sending(endpoint: Endpoint, nbytes: int) -> None:
    """Be killed with a message under way."""
    endpoint.send("ready", "test/0", tag=1)
    endpoint.recv("test/0", tag=1)
    endpoint.isend(np.ones(nbytes, np.uint8), "test/0")
    os.kill(os.getpid(), signal.SIGKILL)


def say_epoch(endpoint: Endpoint) -> None:
    """Tell the incarnation, then answer one message."""
    endpoint.send(endpoint.epoch, "test/0")
    endpoint.send(endpoint.recv("test/0"), "test/0")
    endpoint.recv("test/0", tag=1)


class ConformanceBase:
    """What the conformance tests share.

    Attributes:
        transport: Its name.
        config: Settings of all endpoints.
        one_process: Whether it only connects endpoints of one process.
    """

    transport: ClassVar[str]
    config: ClassVar[CommConfig] = CommConfig()
    one_process: ClassVar[bool] = False

    @pytest.fixture
    def registry(self) -> Iterator[RegistryServer]:
        """A server, unless the transport is not to be had here."""
        usable, missing = transports()
        if self.transport not in usable:
            pytest.skip(f"{self.transport}: {missing.get(self.transport, 'not installed')}")
        with RegistryServer() as server:
            yield server

    @pytest.fixture
    def me(self, registry: RegistryServer) -> Iterator[Endpoint]:
        """The endpoint of the test."""
        with worker("test/0", registry, self._config()) as endpoint:
            yield endpoint

    def _config(self) -> CommConfig:
        return self.config.with_values({"backend_priority": (self.transport,)})

    def _peer(
        self, name: str, registry: RegistryServer, program: Program, *args: object
    ) -> "PeerProcess | PeerThread":
        kind = PeerThread if self.one_process else PeerProcess
        return kind(name, registry, program, *args, config=self._config())

    def _process(
        self, name: str, registry: RegistryServer, program: Program, *args: object
    ) -> PeerProcess:
        if self.one_process:
            pytest.skip(f"{self.transport}: a thread cannot be killed")
        return PeerProcess(name, registry, program, *args, config=self._config())

    def _echo(self, me: Endpoint, obj: Any, tag: int = 0) -> Any:
        me.send(obj, "peer/0", tag=tag)
        return me.recv("peer/0", tag=tag + 100)


class DeliveryTests(ConformanceBase):
    """What is sent arrives, in order."""

    def test_it_is_this_transport(self, registry: RegistryServer, me: Endpoint) -> None:
        """The tests test what they say."""
        with self._peer("peer/0", registry, parrot):
            assert self._echo(me, "hello") == "hello"
            assert me.statistics().connections["peer/0"] == self.transport
            me.send(None, "peer/0")

    def test_all_kinds_of_objects_come_back(self, registry: RegistryServer, me: Endpoint) -> None:
        """Empty, 0-d, strided, nested, large and small."""
        arrays = [
            np.zeros(0),
            np.array(3.5),
            np.arange(10_000.0).reshape(100, 100)[::2, ::3],
            np.ones(3_000_000, np.int8),
            np.array([True, False]),
            np.arange(3, dtype=np.complex64),
        ]
        with self._peer("peer/0", registry, parrot):
            back = self._echo(me, {"arrays": arrays, "bytes": b"x" * 100_000, "none": [None]})
            for sent, got in zip(arrays, back["arrays"], strict=True):
                assert got.dtype == sent.dtype
                assert got.shape == sent.shape
                np.testing.assert_array_equal(got, sent)
            assert back["bytes"] == b"x" * 100_000
            assert back["none"] == [None]
            me.send(None, "peer/0")

    def test_bfloat16_tensors_come_back(self, registry: RegistryServer, me: Endpoint) -> None:
        """A dtype that numpy does not have."""
        torch = pytest.importorskip("torch")
        sent = torch.arange(5000, dtype=torch.bfloat16).reshape(50, 100)
        with self._peer("peer/0", registry, parrot):
            got = self._echo(me, sent)
            assert got.dtype == sent.dtype
            assert torch.equal(got, sent)
            me.send(None, "peer/0")

    def test_the_order_of_one_source_and_tag_is_kept(
        self, registry: RegistryServer, me: Endpoint
    ) -> None:
        """Small and large messages mixed."""
        count = 300
        with self._peer("peer/0", registry, counter, count):
            for number in range(count):
                got = me.recv("peer/0")
                assert (got if isinstance(got, int) else got[0]) == number
            me.send("end", "peer/0")

    def test_a_small_message_of_another_tag_passes_a_large_one(
        self, registry: RegistryServer, me: Endpoint
    ) -> None:
        """And both arrive whole."""
        with self._peer("peer/0", registry, parrot):
            large = np.arange(8_000_000)
            handle = me.isend(large, "peer/0", tag=1)
            assert self._echo(me, "small", tag=2) == "small"
            np.testing.assert_array_equal(me.recv("peer/0", tag=101), large)
            handle.wait()
            me.send(None, "peer/0")

    def test_both_may_send_first(self, registry: RegistryServer, me: Endpoint) -> None:
        """Neither waits for the other's receive."""
        nbytes = 20_000_000
        with self._peer("peer/0", registry, first_speaker, nbytes):
            me.send(np.full(nbytes, 2, np.uint8), "peer/0")
            got = me.recv("peer/0")
            assert got.nbytes == nbytes
            assert (got == 1).all()
            assert me.recv("peer/0", tag=1) == "done"

    def test_both_may_receive_first(self, registry: RegistryServer, me: Endpoint) -> None:
        """What is sent while both wait arrives."""
        with self._peer("peer/0", registry, parrot):
            handle = me.irecv("peer/0", tag=100)
            me.send(1, "peer/0")
            assert handle.result() == 1
            me.send(None, "peer/0")


class OwnershipTests(ConformanceBase):
    """Who may write to what, and when."""

    def test_what_was_sent_may_be_changed(self, registry: RegistryServer, me: Endpoint) -> None:
        """A message is what the object was when it was sent, also if sent without waiting."""
        with self._peer("peer/0", registry, parrot):
            data = np.zeros(2_000_000)
            handles = []
            for value in range(4):
                data[:] = value
                handles.append(me.isend(data, "peer/0"))
                data[:] = -1
            for value in range(4):
                assert (me.recv("peer/0", tag=100) == value).all()
            for handle in handles:
                handle.wait()
            me.send(None, "peer/0")

    def test_what_was_received_is_the_receivers(
        self, registry: RegistryServer, me: Endpoint
    ) -> None:
        """Writing to it changes nothing for anybody, now or later."""
        with self._peer("peer/0", registry, parrot):
            kept = []
            for value in range(20):
                got = self._echo(me, np.full(50_000, value))
                assert (got == value).all()
                got += 1000
                if value % 5 == 0:
                    kept.append(got)
            assert [int(array[0]) for array in kept] == [1000, 1005, 1010, 1015]
            assert all((array == array[0]).all() for array in kept)
            me.send(None, "peer/0")


class FailureTests(ConformanceBase):
    """What happens when a peer dies, and when time runs out."""

    def test_a_peer_killed_before_sending_is_lost(
        self, registry: RegistryServer, me: Endpoint
    ) -> None:
        """The receive that waits for it ends within a second and names it."""
        with self._process("peer/0", registry, die_before_sending):
            assert me.recv("peer/0", tag=1) == "ready"
            me.send("go", "peer/0", tag=1)
            began = time.monotonic()
            with pytest.raises(PeerLost, match="peer/0"):
                me.recv("peer/0")
            assert time.monotonic() - began < 5.0

    def test_a_sender_killed_between_header_and_payload_delivers_nothing(
        self, registry: RegistryServer, me: Endpoint
    ) -> None:
        """A message arrives whole or not at all."""
        nbytes = 100_000_000
        with self._process("peer/0", registry, die_while_sending, nbytes):
            assert me.recv("peer/0", tag=1) == "ready"
            me.send("go", "peer/0", tag=1)
            try:
                got = me.recv("peer/0")
            except PeerLost as error:
                assert str(error.peer) == "peer/0"
            else:
                assert got.nbytes == nbytes
                assert (got == 1).all()

    def test_a_restarted_peer_is_found_under_its_name(
        self, registry: RegistryServer, me: Endpoint
    ) -> None:
        """With a higher epoch."""
        epochs = []
        for _ in range(2):
            with self._process("peer/0", registry, say_epoch) as peer:
                epochs.append(me.recv("peer/0"))
                me.send("are you there?", "peer/0")
                assert me.recv("peer/0") == "are you there?"
                peer.kill()
                with pytest.raises(PeerLost):
                    me.recv("peer/0")
        assert epochs[0] < epochs[1]

    def test_a_deadline_ends_a_receive(self, registry: RegistryServer, me: Endpoint) -> None:
        """And nothing is lost by it."""
        with self._peer("peer/0", registry, parrot):
            assert self._echo(me, 1) == 1
            with pytest.raises(Timeout, match="peer/0"):
                me.recv("peer/0", timeout=0.05)
            assert self._echo(me, 2) == 2
            me.send(None, "peer/0")


class TransportTests(DeliveryTests, OwnershipTests, FailureTests):
    """What every transport must do. Subclass and set `transport`."""
