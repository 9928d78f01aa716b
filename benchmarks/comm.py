"""How near to the floor does rlinf.comm come, and how far from it are the other ways?

Large: a dict of ten float32 arrays to another process on the same host; the floor is one copy
within this process. Small: 64 bytes; the floor is a bare Unix socket. All contestants of a
question take turns within every round.
"""

import contextlib
import dataclasses
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import harness
import numpy as np
import ours
import rivals

from rlinf.comm import RegistryServer, WorkerId, WorkerRecord
from rlinf.comm.codec import join, split
from rlinf.comm.encoding.shorthand import Shortener

SMALL = rivals.ECHO * 64
STREAM = 2000
RALLY = 100
PEERS = 40


@contextlib.contextmanager
def contestants(quick: bool) -> Iterator[dict[str, Any]]:
    """All of them, started; one that is not installed is left out and named."""
    kinds: dict[str, Callable[[], Any]] = {
        "copy in one process": rivals.Copy,
        "Unix socket": rivals.UnixSocket,
        "rlinf shm": lambda: ours.Rlinf("shm", PEERS),
        "rlinf tcp": lambda: ours.Rlinf("tcp", PEERS),
        "TCP socket": rivals.TcpSocket,
        "multiprocessing.Pipe": rivals.Pipe,
        "gloo": rivals.Gloo,
    }
    if not quick:
        kinds["ray"] = rivals.Ray
    with contextlib.ExitStack() as stack:
        started = {}
        for name, kind in kinds.items():
            try:
                started[name] = kind()
            except ImportError as error:
                print(f"without {name}: {error}")
                continue
            if hasattr(started[name], "close"):
                stack.callback(started[name].close)
        yield started


def measure(quick: bool) -> dict[str, object]:
    """All questions."""
    figures: dict[str, object] = {}
    with contestants(quick) as started:
        for megabytes, rounds in ((1, 60), (10, 30), (100, 12)):
            name = f"dict of 10 arrays, {megabytes} MB, delivered and acknowledged"
            figures[name] = large(name, started, megabytes, rounds // 4 if quick else rounds)
        for question in (round_trip, lone_trip, one_way, first_contact):
            name, rows = question(started, quick)
            figures[name] = rows
    for lone in (crowd, all_pairs, broadcast):
        name, rows = lone(quick)
        figures[name] = rows
    figures["header"] = header()
    figures["codec"] = codec(quick)
    return figures


def large(name: str, started: dict[str, Any], megabytes: int, rounds: int) -> object:
    """A dict of arrays to another process."""
    payload = {f"a{i}": np.full(megabytes * 25_000, i, np.float32) for i in range(10)}
    runs: dict[str, Callable[[], object]] = {}
    for who, contestant in started.items():
        if hasattr(contestant, "deliver"):
            runs[who] = lambda c=contestant: c.deliver(payload)
    shm = started["rlinf shm"]
    ready = shm.empty_like(payload)
    runs["rlinf shm, made by empty()"] = lambda: shm.deliver(ready)
    return harness.show(name, harness.race(runs, rounds), "copy in one process")


def round_trip(started: dict[str, Any], quick: bool) -> tuple[str, object]:
    """64 bytes there and back, again and again: how fast two processes can converse."""
    name = f"64 bytes, there and back, {RALLY} times in a row"
    runs = {who: lambda c=c: rally(c) for who, c in started.items() if hasattr(c, "ping")}
    samples = harness.race(runs, 5 if quick else 40)
    return name, harness.show(name, samples, "Unix socket", each=RALLY)


def rally(contestant: Any) -> None:
    """So many round trips."""
    for _ in range(RALLY):
        contestant.ping(SMALL)


def lone_trip(started: dict[str, Any], quick: bool) -> tuple[str, object]:
    """64 bytes there and back, once after something else ran: caches and cores have cooled."""
    name = "64 bytes, there and back, once"
    runs = {who: lambda c=c: c.ping(SMALL) for who, c in started.items() if hasattr(c, "ping")}
    samples = harness.race(runs, 100 if quick else 800, warmup=20)
    return name, harness.show(name, samples, "Unix socket")


def one_way(started: dict[str, Any], quick: bool) -> tuple[str, object]:
    """Small messages one after another."""
    count = STREAM // 4 if quick else STREAM
    name = f"64 bytes, one way, {count} one by one"
    runs = {
        who: lambda c=c: c.stream(SMALL, count)
        for who, c in started.items()
        if hasattr(c, "stream")
    }
    for who in ("rlinf shm", "rlinf tcp"):
        runs[f"{who}, many at a time"] = lambda c=started[who]: c.stream_many(SMALL, count)
    samples = harness.race(runs, 4 if quick else 12, warmup=1)
    return name, harness.show(name, samples, "Unix socket", each=count)


def first_contact(started: dict[str, Any], quick: bool) -> tuple[str, object]:
    """A call to an endpoint never met before: lookup, connection, handshake, call, reply."""
    name = "first call to a peer"
    ranks = {who: iter(range(1, PEERS)) for who in ("rlinf shm", "rlinf tcp")}
    runs = {who: lambda w=who: started[w].meet(next(ranks[w])) for who in ranks}
    runs["Unix socket"] = started["Unix socket"].meet
    samples = harness.race(runs, 10 if quick else PEERS - 3, warmup=2)
    return name, harness.show(name, samples, "Unix socket")


def crowd(quick: bool) -> tuple[str, object]:
    """First contact again, where so many others are registered."""
    name = "first call to a peer, by the number of registered workers"
    runs: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack:
        for size in (100, 10_000):
            registry = RegistryServer(lease_s=600.0)
            for rank in range(size - PEERS):
                registry.register(WorkerRecord(WorkerId("crowd", rank), 1))
            there = ours.Rlinf("shm", PEERS, registry)
            stack.callback(there.close)
            ranks = iter(range(1, PEERS))
            runs[f"{size} workers"] = lambda t=there, r=ranks: t.meet(next(r))
        samples = harness.race(runs, 10 if quick else PEERS - 3, warmup=2)
    return name, harness.show(name, samples, "100 workers")


def all_pairs(quick: bool) -> tuple[str, object]:
    """Processes that all meet each other at once; the same again for the floor, having met."""
    rounds = 3 if quick else 8
    name = "8 processes meet, all pairs"
    with contextlib.closing(ours.Mesh(8, rounds)) as mesh:
        samples = harness.race({"rlinf": mesh.meet}, rounds - 1, warmup=1, patience_s=30.0)
    return name, harness.show(name, samples, "rlinf")


def broadcast(quick: bool) -> tuple[str, object]:
    """100 MB to several processes of this host, all of which have said that they have it."""
    name = "dict of 10 arrays, 100 MB, broadcast"
    payload = {f"a{i}": np.full(2_500_000, i, np.float32) for i in range(10)}
    with contextlib.closing(ours.Audience(4)) as audience:
        runs = {
            f"to {count}": lambda n=count: audience.broadcast(payload, n) for count in (1, 2, 4)
        }
        samples = harness.race(runs, 4 if quick else 15)
    return name, harness.show(name, samples, "to 1")


@dataclasses.dataclass
class Layer:
    """Ten tensors of a made-up model."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any
    input_norm: Any
    attention_norm: Any
    rotary: Any


@dataclasses.dataclass
class Model:
    """A hundred of them."""

    layers: list[Layer]
    step: int


def model(make: Callable[[int], Any]) -> Model:
    """Ten layers of what `make` gives."""
    fields = len(dataclasses.fields(Layer))
    return Model([Layer(*(make(layer) for _ in range(fields))) for layer in range(10)], 17)


def header() -> object:
    """Bytes to describe 100 tensors in nested dataclasses, against JSON."""
    arrays = model(lambda layer: np.zeros((64, 16 + layer), np.float32))
    place = iter(range(100))

    def described(value: Any) -> object:
        if isinstance(value, np.ndarray):
            offset, size = next(place) * value.nbytes, value.nbytes
            shape = list(value.shape)
            return {"dtype": str(value.dtype), "shape": shape, "offset": offset, "nbytes": size}
        if isinstance(value, list):
            return [described(item) for item in value]
        if dataclasses.is_dataclass(value):
            return {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return value

    in_json = len(json.dumps(described(arrays), separators=(",", ":")))
    packed = split(arrays)
    shortener = Shortener()
    first, later = (len(shortener.shorten(packed.header)) for _ in range(2))
    print("\nheader of 100 tensors in nested dataclasses")
    for name, size in (("JSON", in_json), ("first on a connection", first), ("later", later)):
        print(f"  {name:34}{size:>8} bytes{100 * size / in_json:>8.1f} % of JSON")
    return {"json_bytes": in_json, "first_bytes": first, "later_bytes": later}


def pickled(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """What the standard library has."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, 5, buffer_callback=buffers.append), buffers


def codec(quick: bool) -> object:
    """Time to encode and decode, within one process."""
    torch = __import__("torch")
    cases: dict[str, object] = {
        "an int": 5,
        "a dict of 5 scalars": {"a": 1, "b": 2.0, "c": "xyz", "d": True, "e": None},
        "a dict of 10 arrays": {f"a{i}": np.zeros((64, 64)) for i in range(10)},
        "100 arrays in dataclasses": model(lambda layer: np.zeros((64, 16))),
        "100 tensors in dataclasses": model(lambda layer: torch.zeros(64, 16)),
    }
    figures = {}
    for name, value in cases.items():
        packed = split(value)
        runs: dict[str, Callable[[], object]] = {
            "split": lambda value=value: split(value),
            "join": lambda packed=packed: join(*packed),
        }
        floor = "split"
        if "tensors" not in name:  # pickling those takes so long that nothing else stays in cache
            data, buffers = pickled(value)
            floor = "pickle 5, buffers out of band"
            runs[floor] = lambda value=value: pickled(value)
            runs["unpickle"] = lambda data=data, out=buffers: pickle.loads(data, buffers=out)
        samples = harness.race(runs, 100 if quick else 2000, warmup=20, patience_s=1.0)
        figures[name] = harness.show(f"codec: {name}", samples, floor)
    return figures
