"""How long does it take to find a plan? Against the published planner and a plain N^2 search."""

import itertools
import random
import statistics
import subprocess
import sys
import time

import harness

from rlinf.sched import Component, ComponentProfile, FlowGraph, Profile, Sample, search

BATCH = 512
PUBLISHED_S = {1024: 5.98, 4096: 60.0}
GRPO = {"rollout": (591.3, 0.66, 2), "inference": (102.3, 0.88, 4), "training": (367.7, 0.86, 8)}
PPO = {
    "rollout": (),
    "reward": ("rollout",),
    "reference": ("rollout",),
    "old": ("rollout",),
    "values": ("rollout",),
    "critic": ("reward", "values"),
    "actor": ("reward", "reference", "old", "values"),
}


def measure(quick: bool) -> dict[str, object]:
    """All questions."""
    return {
        "three components, valid sizes": three(quick, every_node=False),
        "three components, every number of nodes": three(quick, every_node=True),
        "larger workflows": larger(quick),
        "many workflows of ten components": ten_components(quick),
        "import": imports(quick),
    }


def three(quick: bool, *, every_node: bool) -> object:
    """The 3-component workflow of the published scaling study."""
    runs, plans = {}, {}
    for devices in (256, 1024, 4096, 16384):
        graph, profile = grpo(devices, every_node=every_node)
        names = tuple(f"gpu:{i}" for i in range(devices))
        runs[f"search, {devices} devices"] = lambda g=graph, p=profile, n=names: search(
            g, p, n, BATCH
        )
        plans[devices] = search(graph, profile, names, BATCH)
    size = 128 if quick else 256
    runs[f"plain Python N^2, {size} devices"] = lambda: plain(size)
    title = "three components, " + ("every number of nodes" if every_node else "valid sizes")
    samples = harness.race(runs, 3 if quick else 15, patience_s=20.0)
    rows = harness.show(title, samples, "search, 1024 devices")
    for devices, published in PUBLISHED_S.items():
        ours = min(samples[f"search, {devices} devices"])
        print(f"  published at {devices}: {published} s, {published / ours:,.0f} times ours")
    bounds = {n: plan.bound for n, plan in plans.items()}
    print(f"  bound of each plan (0: exact): {bounds}")
    return {"rows": rows, "bounds": bounds}


def larger(quick: bool) -> object:
    """A PPO workflow, a long chain, a random workflow."""
    rng = random.Random(5)
    ten = [f"s{i}" for i in range(10)]
    some = [(a, b) for i, a in enumerate(ten) for b in ten[i + 1 :] if rng.random() < 0.3]
    chain = [f"s{i}" for i in range(16)]
    cases = {
        "PPO, 7 components, 1024 devices": (
            invented(list(PPO), [(a, b) for b, before in PPO.items() for a in before], 1024),
            1024,
        ),
        "chain of 16, 1024 devices": (
            invented(chain, list(itertools.pairwise(chain)), 1024),
            1024,
        ),
        "workflow of 10, 64 devices": (invented(ten, some, 64), 64),
    }
    runs = {
        name: lambda w=workflow, n=devices: search(*w, n, BATCH)
        for name, (workflow, devices) in cases.items()
    }
    bounds = {name: run().bound for name, run in runs.items()}
    samples = harness.race(runs, 2 if quick else 5, warmup=0, patience_s=20.0)
    rows = harness.show("larger workflows", samples, next(iter(runs)))
    for name, bound in bounds.items():
        print(f"  {name}: at most {100 * bound:.1f} % above the best")
    return {"rows": rows, "bounds": bounds}


def ten_components(quick: bool) -> object:
    """How far from the best can plans of random workflows be, in what processor time?"""
    rows = []
    print("\nrandom workflows of 10 components, 64 devices")
    print(f"  {'edges':>6} {'plan':>10} {'at most above the best':>24} {'time':>10}")
    for share in (0.1, 0.2, 0.3, 0.5, 0.8):
        for seed in range(1 if quick else 4):
            rng = random.Random(f"{share} {seed}")
            names = [f"s{i}" for i in range(10)]
            pairs = itertools.combinations(names, 2)
            edges = [pair for pair in pairs if rng.random() < share]
            workflow = invented(names, edges, 64, seed=rng.randrange(1 << 30))
            start = time.process_time()
            plan = search(*workflow, 64, BATCH)
            taken = time.process_time() - start
            rows.append({"edges": share, "bound": plan.bound, "seconds": taken})
            bound = f"{100 * plan.bound:.1f} %"
            print(f"  {share:>6.0%} {plan.seconds:>8.1f} s {bound:>24} {taken:>8.2f} s")
    for key, unit, scale in (("bound", "%", 100), ("seconds", "s", 1)):
        values = sorted(scale * float(row[key]) for row in rows)
        middle = statistics.median(values)
        print(f"  {key}: {values[0]:.2f} to {values[-1]:.2f} {unit}, median {middle:.2f} {unit}")
    return rows


def imports(quick: bool) -> object:
    """``import rlinf.sched`` in a fresh interpreter, against an empty one."""

    def run(program: str) -> None:
        subprocess.run([sys.executable, "-c", program], check=True)

    runs = {
        "nothing": lambda: run(""),
        "import numpy": lambda: run("import numpy"),
        "import rlinf.sched": lambda: run("import rlinf.sched"),
    }
    return harness.show("import", harness.race(runs, 3 if quick else 9), "nothing")


def grpo(devices: int, *, every_node: bool) -> tuple[FlowGraph, Profile]:
    """GRPO 7B with the published exponents; sizes that divide the batch, or all whole nodes."""
    nodes, entries = [], {}
    for name, (seconds, power, least) in GRPO.items():
        sizes = [least * 2**k for k in range(10) if least * 2**k <= devices]
        if every_node:
            sizes += range(8, devices + 1, 8)
        nodes.append(Component(name, tuple(sizes)))
        entries[name] = measured(seconds, power, 0.1)
    return FlowGraph.chain(*nodes), Profile(entries)


def invented(
    names: list[str], edges: list[tuple[str, str]], devices: int, seed: int = 3
) -> tuple[FlowGraph, Profile]:
    """Random times; sizes are powers of two."""
    rng = random.Random(seed)
    nodes, entries = [], {}
    for name in names:
        least = rng.choice([1, 2, 4, 8])
        sizes = tuple(least * 2**k for k in range(12) if least * 2**k <= devices)
        nodes.append(Component(name, sizes))
        entries[name] = measured(rng.uniform(20, 400), rng.uniform(0.6, 0.95), 0.05)
    return FlowGraph(tuple(nodes), tuple(edges)), Profile(entries)


def measured(seconds: float, power: float, overhead_s: float) -> ComponentProfile:
    """Samples along a power law through ``seconds`` on 64 devices."""
    samples = (Sample(n, BATCH, seconds * (64 / n) ** power) for n in (8, 64, 512, 4096, 16384))
    return ComponentProfile(tuple(samples), overhead_s=overhead_s)


def plain(devices: int) -> float:
    """The published recurrence in plain Python: prefix cuts, every split, one price a size."""
    times = [[float("inf")] + [s * (64 / n) ** p for n in range(1, devices + 1)]
             for s, p, _ in GRPO.values()]  # fmt: skip
    chunk = 1 / BATCH
    best = {(i, i): times[i] for i in range(3)}
    rate = {(i, i): [t * chunk for t in times[i]] for i in range(3)}
    for first, last in ((0, 1), (1, 2), (0, 2)):
        total, period = [float("inf")] * (devices + 1), [float("inf")] * (devices + 1)
        for cut in range(first, last):
            left, right = (first, cut), (cut + 1, last)
            for n in range(1, devices + 1):
                total[n] = min(total[n], best[left][n] + best[right][n])
                for k in range(1, n):
                    slow = max(rate[left][k], rate[right][n - k])
                    cost = rate[left][k] + rate[right][n - k] + (BATCH - 1) * slow
                    if cost < total[n]:
                        total[n], period[n] = cost, slow
        best[first, last], rate[first, last] = total, period
    return best[0, 2][devices]
