"""Queues between processes, each behind the same few methods: those which `channel` compares."""

import itertools
import os
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rivals import SPAWN, Rival

from rlinf.channel import Channel, ChannelConfig, ChannelServer
from rlinf.comm import CommConfig, Endpoint, RegistryClient, RegistryServer

PATIENCE_S = 120.0
BATCHES = 64, 2048
BOUNDED = ChannelConfig(buffer_size="128MB")
"""A producer may be that far ahead; more would measure how fast the system hands out memory."""
SHM = CommConfig(backend_priority=("shm",))

Pipe = Connection


UNIT_S = 0.001
"""An item of weight 1 keeps a consumer of speed 1 busy for so long."""


def touch(item: Any) -> None:
    """Look at an item, so that a lazy transport has to have it."""
    if isinstance(item, np.ndarray):
        item.item(-1)


def answer(pipe: "Pipe[Any, Any]", work: Callable[[Any], None]) -> None:
    """Do what comes, and say when it is done, until None comes."""
    pipe.send("up")
    while (order := pipe.recv()) is not None:
        work(order)
        pipe.send("done")


class Team(Rival):
    """Some processes that take orders over a pipe each."""

    def __init__(self) -> None:
        super().__init__()
        self._members: list[tuple[Any, Pipe[Any, Any]]] = []

    def enlist(self, program: Callable[..., None], *arguments: object) -> int:
        """Start one more process; its number."""
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=program, args=(there, *arguments), daemon=True)
        process.start()
        assert here.poll(PATIENCE_S) and here.recv() == "up"
        self._members.append((process, here))
        return len(self._members) - 1

    def order(self, member: int, order: object) -> None:
        """Tell one member what to do."""
        self._members[member][1].send(order)

    def wait(self, member: int) -> None:
        """Until it is done."""
        pipe = self._members[member][1]
        assert pipe.poll(PATIENCE_S) and pipe.recv() == "done", "a process of the benchmark hangs"

    def close(self) -> None:
        """End them, the last one first."""
        for process, pipe in reversed(self._members):
            pipe.send(None)
            process.join(10.0)
            process.terminate()


# -- rlinf ----------------------------------------------------------------------------------------


def endpoint(name: str, address: str, token: bytes) -> Endpoint:
    """An endpoint of a process of the benchmark."""
    return Endpoint(name, registry=RegistryClient(address, token), config=SHM)


def serve(pipe: "Pipe[Any, Any]", address: str, token: bytes) -> None:
    """The channel server's process."""
    with endpoint("channel/0", address, token) as mine, ChannelServer(mine):
        answer(pipe, lambda order: None)


def consume(pipe: "Pipe[Any, Any]", rank: int, address: str, token: bytes) -> None:
    """A consumer: an order is (channel, count, items of a batch; 0: one by one)."""
    with endpoint(f"consumer/{rank}", address, token) as mine:
        channels: dict[str, Channel] = {}

        def work(order: tuple[str, int, int]) -> None:
            name, count, size = order
            channel = channels.get(name)
            if channel is None:
                channel = channels[name] = Channel.connect(name, mine)
            while count:
                if size:
                    for item in (items := channel.get_batch(max_items=min(size, count))):
                        touch(item)
                    count -= len(items)
                else:
                    touch(channel.get())
                    count -= 1
            channel.ack()

        answer(pipe, work)


def labour(pipe: "Pipe[Any, Any]", rank: int, address: str, token: bytes) -> None:
    """A consumer that takes its time: an order is (channel, speed it has, speed it declares)."""
    with endpoint(f"labour/{rank}", address, token) as mine:

        def work(order: tuple[str, float, float]) -> None:
            name, speed, declared = order
            for weight in Channel.connect(name, mine, capacity=declared):
                time.sleep(weight * UNIT_S / speed)

        answer(pipe, work)


def produce(pipe: "Pipe[Any, Any]", rank: int, address: str, token: bytes) -> None:
    """A producer: an order is (channel, count, item)."""
    with endpoint(f"producer/{rank}", address, token) as mine:

        def work(order: tuple[str, int, object]) -> None:
            name, count, item = order
            channel = Channel.connect(name, mine)
            for _ in range(count):
                channel.put(item)
            channel.flush()

        answer(pipe, work)


class Rlinf(Team):
    """A registry here, a server, and as many consumers and producers as asked for."""

    def __init__(self, consumers: int = 1, producers: int = 0) -> None:
        super().__init__()
        self._registry = RegistryServer()
        where = self._registry.address, self._registry.token
        self.enlist(serve, *where)
        self._consumers = [self.enlist(consume, rank, *where) for rank in range(consumers)]
        self._producers = [self.enlist(produce, rank, *where) for rank in range(producers)]
        self._me = Endpoint("producer/9", registry=self._registry, config=SHM)
        self._channels = {
            "": Channel.create("usual", self._me, BOUNDED),
            "one by one": Channel.create(
                "one by one", self._me, ChannelConfig(put_window_items=0, prefetch_items=1)
            ),
        }

    def stream(self, item: object, count: int, how: str = "") -> None:
        """Put so many from here; until the consumer has them all."""
        channel = self._channels[how]
        self.order(self._consumers[0], (channel.ref.name, count, 0))
        for _ in range(count):
            channel.put(item)
        self.wait(self._consumers[0])

    def stream_batches(self, item: object, count: int, size: int) -> None:
        """The same with put_many and get_batch of so many."""
        self.order(self._consumers[0], ("usual", count, size))
        for first in range(0, count, size):
            self._channels[""].put_many([item] * min(size, count - first))
        self.wait(self._consumers[0])

    def depth(self) -> int:
        """A question to the server and its answer."""
        return self._channels[""].qsize()

    def crowd(self, item: object, count: int) -> None:
        """All producers to all consumers, an equal number each."""
        for member in self._consumers:
            self.order(member, ("usual", count // len(self._consumers), 0))
        for member in self._producers:
            self.order(member, ("usual", count // len(self._producers), item))
        for member in (*self._producers, *self._consumers):
            self.wait(member)

    @property
    def where(self) -> tuple[str, bytes]:
        """Address and token of the registry."""
        return self._registry.address, self._registry.token

    def gather(self) -> None:
        """Have every consumer get an item, so that the server knows all of them."""
        for member in self._consumers:
            self.order(member, ("usual", 1, 0))
        self._channels[""].put_many([b"x"] * len(self._consumers))
        for member in self._consumers:
            self.wait(member)

    def server_seconds(self, seconds: float) -> float:
        """CPU seconds that the server's process uses in so many from now."""
        server = psutil.Process(self._members[0][0].pid)
        before = sum(server.cpu_times()[:2])
        time.sleep(seconds)
        return sum(server.cpu_times()[:2]) - before

    def spent(self) -> dict[str, float]:
        """Processor seconds so far of the producer (this process), the server and a consumer."""
        pids = os.getpid(), self._members[0][0].pid, self._members[self._consumers[0]][0].pid
        used = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
        return dict(zip(("producer", "server", "consumer"), used, strict=True))

    def pin(self, cores: set[int]) -> None:
        """Keep all processes, but for this one, on these cores."""
        for process, _ in self._members:
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)

    def close(self) -> None:
        """End everything."""
        self._me.close()
        super().close()
        self._registry.close()


class Crew(Team):
    """A registry here, a server, and consumers of different speed that take their time."""

    def __init__(self, speeds: Sequence[float]) -> None:
        super().__init__()
        self._speeds = speeds
        self._registry = RegistryServer()
        where = self._registry.address, self._registry.token
        self.enlist(serve, *where)
        self._labourers = [self.enlist(labour, rank, *where) for rank in range(len(speeds))]
        self._me = Endpoint("producer/9", registry=self._registry, config=SHM)
        self._numbers = itertools.count()

    def work_off(self, weights: Sequence[float], policy: str, *, declared: bool = False) -> None:
        """All of them share one channel, by this policy, until it is drained."""
        channel = self._fill(weights, policy)
        for member, speed in zip(self._labourers, self._speeds, strict=True):
            self.order(member, (channel.ref.name, speed, speed if declared else 1.0))
        for member in self._labourers:
            self.wait(member)

    def work_off_dealt(self, weights: Sequence[float]) -> None:
        """A channel each, and the items dealt out in turn: static assignment."""
        count = len(self._labourers)
        hands = [self._fill(weights[rank::count], "weighted") for rank in range(count)]
        for member, speed, hand in zip(self._labourers, self._speeds, hands, strict=True):
            self.order(member, (hand.ref.name, speed, 1.0))
        for member in self._labourers:
            self.wait(member)

    def _fill(self, weights: Sequence[float], policy: str) -> Channel:
        channel = Channel.create(
            f"work-{next(self._numbers)}", self._me, ChannelConfig(type=policy)
        )
        channel.put_many(list(weights), weights=weights)
        channel.close()
        return channel

    def close(self) -> None:
        """End everything."""
        self._me.close()
        super().close()
        self._registry.close()


# -- multiprocessing ------------------------------------------------------------------------------


def queue_consume(pipe: "Pipe[Any, Any]", queue: Any) -> None:
    """A consumer: an order is a count. A list is so many items."""

    def work(count: int) -> None:
        while count > 0:
            item = queue.get()
            for one in item if type(item) is list else (item,):
                touch(one)
                count -= 1

    answer(pipe, work)


def queue_produce(pipe: "Pipe[Any, Any]", queue: Any) -> None:
    """A producer: an order is (count, item)."""

    def work(order: tuple[int, object]) -> None:
        for _ in range(order[0]):
            queue.put(order[1])

    answer(pipe, work)


class Queue(Team):
    """multiprocessing.SimpleQueue, or Queue with its feeder thread."""

    def __init__(self, kind: Callable[..., Any], consumers: int = 1, producers: int = 0) -> None:
        super().__init__()
        self._queue = kind()
        self._consumers = [self.enlist(queue_consume, self._queue) for _ in range(consumers)]
        self._producers = [self.enlist(queue_produce, self._queue) for _ in range(producers)]

    def stream(self, item: object, count: int) -> None:
        """Put so many from here; until the consumer has them all."""
        self.order(0, count)
        for _ in range(count):
            self._queue.put(item)
        self.wait(0)

    def stream_lists(self, item: object, count: int, size: int) -> None:
        """The same, so many to a list: what batches save where nothing is promised."""
        several = [pickle.loads(pickle.dumps(item)) for _ in range(size)]  # not one, named often
        self.order(0, count)
        for first in range(0, count, size):
            self._queue.put(several[: min(size, count - first)])
        self.wait(0)

    crowd = Rlinf.crowd

    def order(self, member: int, order: Any) -> None:
        """As `Team`; the channel's name that `crowd` gives is of no use here."""
        if isinstance(order, tuple):
            order = order[1] if member in self._consumers else order[1:]
        super().order(member, order)


def queue_labour(pipe: "Pipe[Any, Any]", queue: Any) -> None:
    """A consumer that takes its time: an order is its speed. None ends it."""

    def work(speed: float) -> None:
        while (weight := queue.get()) is not None:
            time.sleep(weight * UNIT_S / speed)

    answer(pipe, work)


class BareCrew(Team):
    """`Crew` on a SimpleQueue: who is free takes the next; nobody weighs or promises anything."""

    def __init__(self, speeds: Sequence[float]) -> None:
        super().__init__()
        self._speeds = speeds
        self._queue = SPAWN.SimpleQueue()
        self._labourers = [self.enlist(queue_labour, self._queue) for _ in speeds]

    def work_off(self, weights: Sequence[float]) -> None:
        """All of them share the queue until it is empty."""
        for weight in (*weights, *[None] * len(self._speeds)):
            self._queue.put(weight)
        for member, speed in zip(self._labourers, self._speeds, strict=True):
            self.order(member, speed)
        for member in self._labourers:
            self.wait(member)


# -- ray ------------------------------------------------------------------------------------------


class Ray:
    """ray.util.queue: an actor that holds an asyncio queue."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray
        from ray.util.queue import Queue as RayQueue

        class There:
            def consume(self, queue: Any, count: int) -> int:
                for _ in range(count):
                    touch(queue.get())
                return count

        self._ray = ray
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=1 << 30,
        )
        self._queue = RayQueue(actor_options={"num_cpus": 0})
        self._there = ray.remote(num_cpus=0)(There).remote()
        self.stream(b"warm", 5)

    def stream(self, item: object, count: int) -> None:
        """See `Rlinf.stream`."""
        done = self._there.consume.remote(self._queue, count)
        for _ in range(count):
            self._queue.put(item)
        self._ray.get(done, timeout=PATIENCE_S)

    def close(self) -> None:
        """Shut the cluster down."""
        self._ray.shutdown()
