"""How fast does a queue between processes move items, and how far behind are the other queues?

One producer (this process) and one consumer, or several of both, on one host. The channel's server
is a process of its own, every item is acknowledged and would survive its consumer; the queues of
multiprocessing lose what a killed consumer had taken. All contestants of a question take turns
within every round; a sample is the time for one item.

Then: how near to the optimum does the balancing come, and what does watching cost?
"""

import contextlib
import itertools
import mmap
import os
import pty
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import numpy as np
import psutil
from queues import BATCHES, UNIT_S, BareCrew, Crew, Queue, Ray, Rlinf, touch
from rivals import SPAWN

from rlinf.channel import announce

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
    rlinf, simple = team["rlinf"], team["SimpleQueue"]
    large = isinstance(item, np.ndarray) and item.nbytes > 1 << 16
    runs: dict[str, tuple[Callable[[int], object], int]] = {
        "rlinf put, get": (lambda n: rlinf.stream(item, n), count),
        "rlinf, a round trip each": (lambda n: rlinf.stream(item, n, "one by one"), count // 20),
    }
    for name in ("SimpleQueue", "multiprocessing.Queue"):
        runs[name] = (lambda n, queue=team[name]: queue.stream(item, n), count)
    for size in BATCHES[:1] if large else BATCHES:
        many = 2 * count if large else max(2 * count, 128 * size)
        ours, theirs = f"rlinf put_many, get_batch of {size}", f"SimpleQueue, lists of {size}"
        runs[ours] = (lambda n, size=size: rlinf.stream_batches(item, n, size), many)
        runs[theirs] = (lambda n, size=size: simple.stream_lists(item, n, size), many)
    if "ray.util.queue" in team:
        runs["ray.util.queue"] = (lambda n: team["ray.util.queue"].stream(item, n), 60)
    if large:
        ring = places(item)
        for several in (1, BATCHES[0]):
            runs[f"np.copyto, one process, {several} place(s) in turn"] = (
                lambda n, several=several: [np.copyto(ring[i % several], item) for i in range(n)],
                count,
            )
    return timed(runs, rounds)


def crowds(rounds: int) -> dict[str, object]:
    """More and more producers and consumers, on both cores and on one."""
    figures: dict[str, object] = {}
    cores = os.sched_getaffinity(0)
    for name, item, count in (
        ("1 KB of bytes", bytes(1024), 16_000),
        ("1 MB array", np.zeros(1 << 18, np.float32), 320),
    ):
        kinds: dict[str, Callable[[], Any]] = {}
        for n in (1, 2, 8):
            kinds[f"rlinf, {n} to {n}"] = lambda n=n: Rlinf(n, n)
            kinds[f"SimpleQueue, {n} to {n}"] = lambda n=n: Queue(SPAWN.SimpleQueue, n, n)
        kinds["rlinf, 2 to 2 on one core"] = lambda: Rlinf(2, 2)
        with started(kinds) as team:
            team["rlinf, 2 to 2 on one core"].pin({min(cores)})
            runs: dict[str, tuple[Callable[[int], object], int]] = {
                who: (lambda n, c=c, item=item: c.crowd(item, n), count) for who, c in team.items()
            }
            title = f"{name}, several producers and consumers"
            figures[title] = harness.show(title, timed(runs, rounds), "rlinf, 1 to 1")
    return figures


def places(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Shared memory for so many copies of an array as are in a large batch, used before."""
    memory = mmap.mmap(-1, BATCHES[0] * array.nbytes)
    ring = np.frombuffer(memory, array.dtype).reshape(BATCHES[0], -1)
    ring[:] = 1
    return ring


def floors(rounds: int) -> dict[str, object]:
    """What nothing that moves items between processes by this code can do without."""
    title, array = "The floor of a channel", np.zeros(1 << 18, np.float32)
    ring, size, row = places(array), BATCHES[1], struct.Struct("1024s" * 64)
    block, pieces = memoryview(bytearray(1024 * size)), [bytes(1024) for _ in range(size)]
    small = [np.zeros(256, np.float32) for _ in range(size)]

    def put_in() -> None:
        for at in range(0, size, 64):
            row.pack_into(block, 1024 * at, *pieces[at : at + 64])

    def take_out() -> None:
        for item in list(itertools.chain.from_iterable(row.iter_unpack(block))):
            touch(item)

    def take_arrays_out() -> None:
        for item in list(np.frombuffer(bytearray(block), np.float32).reshape(size, -1)):
            touch(item)

    def copy(several: int, count: int) -> None:
        for at in range(count):
            np.copyto(ring[at % several], array)

    small_ones: dict[str, Callable[[], object]] = {
        "1 KB of bytes into a block": put_in,
        "1 KB of bytes out of a block and looked at": take_out,
        "1 KB array into a block": lambda: b"".join(small),  # type: ignore[arg-type]
        "1 KB array out of a block and looked at": take_arrays_out,
    }
    with started({"rlinf": Rlinf}) as team:
        rlinf: Rlinf = team["rlinf"]
        runs: dict[str, tuple[Callable[[int], object], int]] = {
            name: (lambda n, run=run: [run() for _ in range(n // size)], 16 * size)
            for name, run in small_ones.items()
        }
        for several in (1, 8, BATCHES[0]):
            name = f"1 MB copied, {several} place(s) in turn"
            runs[name] = lambda n, several=several: copy(several, n), 400
        runs["a question to the server"] = lambda n: [rlinf.depth() for _ in range(n)], 400
        return {title: harness.show(title, timed(runs, rounds), "1 KB of bytes into a block")}


PAUSE_S = 0.016


def answers() -> dict[str, object]:
    """How long an answer takes: among processes at work, and when both have slept for a while."""
    title = "An answer from another process"
    samples: harness.Samples = {}
    with started({"rlinf": Rlinf}) as team:
        rlinf: Rlinf = team["rlinf"]

        def over_a_pipe() -> None:
            rlinf.order(0, "")
            rlinf.wait(0)

        for name, ask in (("channel server", rlinf.depth), ("bare pipe", over_a_pipe)):
            for when, pause_s in (("at once", 0.0), ("after 16 ms of sleep", PAUSE_S)):
                taken = samples[f"{name}, {when}"] = []
                for _ in range(100):
                    time.sleep(pause_s)
                    start = time.perf_counter()
                    ask()
                    taken.append(time.perf_counter() - start)
    return {title: harness.show(title, samples, "bare pipe, at once")}


def costs() -> dict[str, object]:
    """Who spends how much processor time on an item: that is what no second core takes off."""
    title = "Processor time of an item"
    rows: list[dict[str, object]] = []
    print(f"\n{title}, in us")
    with started({"rlinf": Rlinf}) as team:
        rlinf: Rlinf = team["rlinf"]
        for name, item, count, size in (
            ("1 KB of bytes, batches of 2048", bytes(1024), 1_000_000, 2048),
            ("1 KB array, batches of 2048", np.zeros(256, np.float32), 500_000, 2048),
            ("1 MB array, batches of 64", np.zeros(1 << 18, np.float32), 6_400, 64),
            ("1 MB array, put and get", np.zeros(1 << 18, np.float32), 6_400, 0),
        ):
            for number in (count // 10, count):  # the first warms up
                before = rlinf.spent()
                if size:
                    rlinf.stream_batches(item, number, size)
                else:
                    rlinf.stream(item, number)
                after = rlinf.spent()
            row = {who: round(1e6 * (after[who] - before[who]) / count, 2) for who in after}
            rows.append({"name": name, **row})
            print(f"  {name:34}" + "".join(f"{who:>12} {us:8}" for who, us in row.items()))
    return {title: rows}


def coalescing(rounds: int) -> dict[str, object]:
    """What it saves to let small items travel together."""
    title, item, count = "64 B items, together or each in a message", bytes(64), 20_000
    with started({"rlinf": Rlinf}) as team:
        rlinf = team["rlinf"]
        runs: dict[str, tuple[Callable[[int], object], int]] = {
            "put, get: together": (lambda n: rlinf.stream(item, n), count),
            "a message each": (lambda n: rlinf.stream(item, n, "one by one"), count // 20),
        }
        return {title: harness.show(title, timed(runs, rounds), "a message each")}


def balance(rounds: int) -> dict[str, object]:
    """Two consumers of speed 1 and 3 and items of weight 1 to 100: seconds to the end."""
    speeds, weights = (1.0, 3.0), [float(weight) for weight in range(1, 101)]
    random.Random(0).shuffle(weights)
    fluid_s = sum(weights) * UNIT_S / sum(speeds)
    title = f"Balance: consumers 1:3, weights 1..100; the fluid optimum is {fluid_s:.3f} s"
    kinds: dict[str, Callable[[], Any]] = {
        "crew": lambda: Crew(speeds),
        "bare": lambda: BareCrew(speeds),
    }
    with started(kinds) as team:
        crew, bare = team["crew"], team["bare"]
        runs: dict[str, Callable[[], object]] = {
            "static: dealt out in turn": lambda: crew.work_off_dealt(weights),
            "SimpleQueue: who is free takes the next": lambda: bare.work_off(weights),
            "weighted, speeds declared": lambda: crew.work_off(weights, "weighted", declared=True),
        }
        for policy in ("adaptive", "least_loaded", "round_robin", "weighted"):
            runs[policy] = lambda policy=policy: crew.work_off(weights, policy)
        samples = harness.race(runs, rounds, warmup=0, patience_s=60.0)
    samples["fluid optimum"] = [fluid_s] * len(samples["adaptive"])
    return {title: harness.show(title, samples, "fluid optimum")}


WATCHED_S = 20.0


def watching() -> dict[str, object]:
    """What a live `rlinf-monitor` costs: itself, and the server that it asks."""
    title = "rlinf-monitor on a job of 8 consumers, a picture a second"
    with started({"rlinf": lambda: Rlinf(8, 0)}) as team:
        rlinf: Rlinf = team["rlinf"]
        rlinf.gather()
        idle = rlinf.server_seconds(WATCHED_S / 2)
        with announce(*rlinf.where):
            command = [sys.executable, "-m", "rlinf.channel.monitor", str(os.getpid())]
            terminal, theirs = pty.openpty()
            monitor = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
            os.close(theirs)
            threading.Thread(target=swallow, args=(terminal,), daemon=True).start()
            process = psutil.Process(monitor.pid)
            time.sleep(5.0)  # it has started
            before = sum(process.cpu_times()[:2])
            asked = rlinf.server_seconds(WATCHED_S)
            used = sum(process.cpu_times()[:2]) - before
            if monitor.poll() is not None:
                raise SystemExit("rlinf-monitor ended while it was watched")
            monitor.terminate()
            monitor.wait()
    rows = [
        {"name": "rlinf-monitor", "percent_of_a_core": round(100 * used / WATCHED_S, 2)},
        {
            "name": "the channel server, by its questions",
            "percent_of_a_core": round(100 * (asked / WATCHED_S - 2 * idle / WATCHED_S), 2),
        },
    ]
    print(f"\n{title}")
    for row in rows:
        print(f"  {row['name']:44}{row['percent_of_a_core']:>8} % of a core")
    return {title: rows}


def swallow(terminal: int) -> None:
    """Read what a program writes on its terminal until it ends."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


def measure(quick: bool) -> dict[str, object]:
    """All questions."""
    rounds = 3 if quick else 7
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
    figures |= floors(rounds)
    figures |= costs()
    figures |= coalescing(rounds)
    figures |= crowds(3 if quick else 5)
    figures |= answers()
    figures |= balance(3)
    figures |= watching()
    return figures
