"""How fast does a queue between processes move items, and how far behind are the other queues?

One producer (this process) and one consumer, or two and two, on one host. The channel's server is
a process of its own, every item is acknowledged and would survive its consumer; the queues of
multiprocessing lose what a killed consumer had taken. All contestants of a question take turns
within every round; a sample is the time for one item.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import harness
import numpy as np
from rivals import SPAWN, Rival

from rlinf.channel import Channel, ChannelConfig, ChannelServer
from rlinf.comm import CommConfig, Endpoint, RegistryClient, RegistryServer

PATIENCE_S = 120.0
BATCH = 64
BOUNDED = ChannelConfig(buffer_size="128MB")
"""A producer may be that far ahead; more would measure how fast the system hands out memory."""
SHM = CommConfig(backend_priority=("shm",))

Pipe = Connection


def touch(item: Any) -> None:
    """Look at an item, so that a lazy transport has to have it."""
    if isinstance(item, np.ndarray):
        item[-1].item()


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
    """A consumer: an order is (channel, count, by batches)."""
    with endpoint(f"consumer/{rank}", address, token) as mine:
        channels: dict[str, Channel] = {}

        def work(order: tuple[str, int, bool]) -> None:
            name, count, batches = order
            channel = channels.get(name)
            if channel is None:
                channel = channels[name] = Channel.connect(name, mine)
            while count:
                if batches:
                    for item in (items := channel.get_batch(max_items=min(BATCH, count))):
                        touch(item)
                    count -= len(items)
                else:
                    touch(channel.get())
                    count -= 1
            channel.ack()

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
        self.order(self._consumers[0], (channel.ref.name, count, False))
        for _ in range(count):
            channel.put(item)
        self.wait(self._consumers[0])

    def stream_batches(self, item: object, count: int) -> None:
        """The same with put_many and get_batch."""
        self.order(self._consumers[0], ("usual", count, True))
        for first in range(0, count, BATCH):
            self._channels[""].put_many([item] * min(BATCH, count - first))
        self.wait(self._consumers[0])

    def crowd(self, item: object, count: int) -> None:
        """All producers to all consumers, an equal number each."""
        for member in self._consumers:
            self.order(member, ("usual", count // len(self._consumers), False))
        for member in self._producers:
            self.order(member, ("usual", count // len(self._producers), item))
        for member in (*self._producers, *self._consumers):
            self.wait(member)

    def close(self) -> None:
        """End everything."""
        self._me.close()
        super().close()
        self._registry.close()


# -- multiprocessing ------------------------------------------------------------------------------


def queue_consume(pipe: "Pipe[Any, Any]", queue: Any) -> None:
    """A consumer: an order is a count."""

    def work(count: int) -> None:
        for _ in range(count):
            touch(queue.get())

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

    crowd = Rlinf.crowd

    def order(self, member: int, order: Any) -> None:
        """As `Team`; the channel's name that `crowd` gives is of no use here."""
        if isinstance(order, tuple):
            order = order[1] if member in self._consumers else order[1:]
        super().order(member, order)


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


# -- the questions --------------------------------------------------------------------------------


@contextlib.contextmanager
def started(kinds: dict[str, Callable[[], Any]]) -> Iterator[dict[str, Any]]:
    """All contestants; one that is not installed is left out and named."""
    with contextlib.ExitStack() as stack:
        team = {}
        for name, kind in kinds.items():
            try:
                team[name] = kind()
            except ImportError as error:
                print(f"without {name}: {error}")
                continue
            stack.callback(team[name].close)
        yield team


def timed(runs: dict[str, tuple[Callable[[int], object], int]], rounds: int) -> harness.Samples:
    """Seconds for one item: like `harness.race`, but each contestant has a count of its own."""
    samples: harness.Samples = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (run, count) in runs.items():
            start = time.perf_counter()
            run(count)
            if number:  # the first round warms up
                samples[name].append((time.perf_counter() - start) / count)
    return samples


def one_to_one(team: dict[str, Any], item: Any, count: int, rounds: int) -> harness.Samples:
    """One producer, one consumer."""
    rlinf = team["rlinf"]
    runs: dict[str, tuple[Callable[[int], object], int]] = {
        "rlinf put, get": (lambda n: rlinf.stream(item, n), count),
        "rlinf put_many, get_batch of 64": (lambda n: rlinf.stream_batches(item, n), count),
        "rlinf, a round trip each": (lambda n: rlinf.stream(item, n, "one by one"), count // 20),
    }
    for name in ("SimpleQueue", "multiprocessing.Queue"):
        runs[name] = (lambda n, queue=team[name]: queue.stream(item, n), count)
    if "ray.util.queue" in team:
        runs["ray.util.queue"] = (lambda n: team["ray.util.queue"].stream(item, n), 60)
    if isinstance(item, np.ndarray) and item.nbytes > 1 << 16:
        kept = np.empty_like(item)
        runs["np.copyto, one process"] = (
            lambda n: [np.copyto(kept, item) for _ in range(n)],
            count,
        )
    return timed(runs, rounds)


def measure(quick: bool) -> dict[str, object]:
    """All questions."""
    rounds = 3 if quick else 9
    kinds: dict[str, Callable[[], Any]] = {
        "rlinf": Rlinf,
        "SimpleQueue": lambda: Queue(SPAWN.SimpleQueue),
        "multiprocessing.Queue": lambda: Queue(SPAWN.Queue),
    }
    if not quick:
        kinds["ray.util.queue"] = Ray
    figures: dict[str, object] = {}
    with started(kinds) as team:
        for name, item, count in (
            ("1 KB of bytes, 1 to 1", bytes(1024), 20_000),
            ("1 KB array, 1 to 1", np.zeros(256, np.float32), 10_000),
            ("1 MB array, 1 to 1", np.zeros(1 << 18, np.float32), 400),
        ):
            samples = one_to_one(team, item, count // 4 if quick else count, rounds)
            figures[name] = harness.show(name, samples, "SimpleQueue")
    kinds = {
        "rlinf put, get": lambda: Rlinf(2, 2),
        "SimpleQueue": lambda: Queue(SPAWN.SimpleQueue, 2, 2),
    }
    with started(kinds) as team:
        for name, item, count in (
            ("1 KB of bytes, 2 to 2", bytes(1024), 20_000),
            ("1 MB array, 2 to 2", np.zeros(1 << 18, np.float32), 400),
        ):
            runs = {
                who: (lambda n, c=c, item=item: c.crowd(item, n), count) for who, c in team.items()
            }
            figures[name] = harness.show(name, timed(runs, rounds), "SimpleQueue")
    return figures
