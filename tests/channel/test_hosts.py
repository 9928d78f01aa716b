"""Channels across hosts: network namespaces with a cable between them stand for the machines.

Nothing of memory is shared between them (`host_id` differs), so everything goes over tcp.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

ITEM_BYTES = 1 << 20
ITEMS = 16
WAIT_S = 60.0
HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3"}

SERVE = """
import sys
from rlinf.channel import Channel, ChannelServer
from rlinf.comm import Endpoint, RegistryServer
with (
    RegistryServer(host=sys.argv[1]) as registry,
    Endpoint("channel/0", registry=registry) as mine,
    ChannelServer(mine),
):
    channel = Channel.create("samples", mine)
    print(registry.address, registry.token.hex(), flush=True)
    input()
"""

WORK = """
import sys
import numpy as np
from rlinf.channel import Channel
from rlinf.comm import Endpoint, RegistryClient
role, address, token, count, size = sys.argv[1:]
with Endpoint(f"{role}/0", registry=RegistryClient(address, token)) as mine:
    channel = Channel.connect("samples", mine)
    print("up", flush=True)
    input()
    if role == "producer":
        for number in range(int(count)):
            channel.put(np.full(int(size), number % 251, np.uint8))
        channel.flush()
        print("put", flush=True)
        input()
        channel.close()
    else:
        for number, item in enumerate(channel):
            assert item.nbytes == int(size) and (item == number % 251).all(), number
        channel.ack()
        print(number + 1, channel.statistics().acknowledged_items, flush=True)
"""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Net:
    """Three hosts on one switch, which is in the third."""

    def __init__(self) -> None:
        self._tag = f"rlinf{os.getpid()}"

    def name(self, host: str) -> str:
        return f"{self._tag}{host}"

    def build(self) -> None:
        for host in HOSTS:
            ip("netns", "add", self.name(host))
            ip("-n", self.name(host), "link", "set", "lo", "up")
        switch = self.name("c")
        ip("-n", switch, "link", "add", "eth0", "type", "bridge")
        for host in ("a", "b"):
            port = f"port-{host}"
            ip("-n", self.name(host), "link", "add", "eth0", "type", "veth", "peer", port)
            ip("-n", self.name(host), "link", "set", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "eth0")
            ip("-n", switch, "link", "set", port, "up")
        for host, address in HOSTS.items():
            ip("-n", self.name(host), "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", self.name(host), "link", "set", "eth0", "up")

    def remove(self) -> None:
        for host in HOSTS:
            with contextlib.suppress(OSError):
                ip("netns", "del", self.name(host))

    def received(self, host: str) -> int:
        """Bytes which a host has received over its cable."""
        (link,) = json.loads(ip("-n", self.name(host), "-s", "-j", "link", "show", "eth0"))
        return int(link["stats64"]["rx"]["bytes"])

    @contextlib.contextmanager
    def process(self, host: str, program: str, *words: str) -> Iterator["Process"]:
        command = ["ip", "netns", "exec", self.name(host), sys.executable, "-c", program, *words]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                yield Process(process)
            finally:
                process.kill()


class Process:
    """A program on one of the hosts, told to go on by a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` to make network namespaces")
    net = Net()
    try:
        try:
            net.build()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield net
    finally:
        net.remove()


@pytest.mark.parametrize("server", ["a", pytest.param("b", marks=pytest.mark.slow), "c"])
def test_payload_crosses_each_cable_once_at_most(net: Net, server: str) -> None:
    """Producer on a, consumer on b, the server on either or on a third host."""
    work = (str(ITEMS), str(ITEM_BYTES))
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(net.process(server, SERVE, HOSTS[server]))
        where = hub.line().split()
        producer = stack.enter_context(net.process("a", WORK, "producer", *where, *work))
        consumer = stack.enter_context(net.process("b", WORK, "consumer", *where, *work))
        assert (producer.line(), consumer.line()) == ("up", "up")
        before = {host: net.received(host) for host in "ab"}
        producer.go_on()
        assert producer.line() == "put"
        consumer.go_on()
        producer.go_on()
        assert consumer.line() == f"{ITEMS} {ITEMS}"
        got = {host: net.received(host) - before[host] for host in "ab"}
    payload = ITEMS * ITEM_BYTES
    assert payload <= got["b"] < 1.25 * payload, "the consumer got every byte once"
    assert got["a"] < 0.25 * payload, "nothing came back to the producer"


def test_what_a_dead_producer_on_another_host_put_is_delivered(net: Net) -> None:
    work = (str(ITEMS), str(ITEM_BYTES))
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(net.process("c", SERVE, HOSTS["c"]))
        where = hub.line().split()
        producer = stack.enter_context(net.process("a", WORK, "producer", *where, *work))
        consumer = stack.enter_context(net.process("b", WORK, "consumer", *where, *work))
        assert (producer.line(), consumer.line()) == ("up", "up")
        producer.go_on()
        assert producer.line() == "put"
        producer.kill()
        closer = stack.enter_context(net.process("a", WORK, "producer", *where, "0", "0"))
        assert closer.line() == "up"
        closer.go_on()
        assert closer.line() == "put"
        closer.go_on()
        consumer.go_on()
        assert consumer.line() == f"{ITEMS} {ITEMS}"
