"""Predicted against simulated, with the published distribution of response lengths."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlinf.sched import (
    ComponentProfile,
    Engine,
    FlowGraph,
    Leaf,
    Plan,
    Profile,
    Reality,
    SchedError,
    Spatial,
    gantt,
    profile_engine,
    simulate,
    temporal_plan,
)
from rlinf.sched.trace import load_trace

CURVE = np.array(json.loads((Path(__file__).parent / "data" / "rollout_cdf.json").read_text()))
GRAPH = FlowGraph.chain("rollout", "inference", "train")
BATCH = 128


def published_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    seconds = np.interp(rng.random(count), CURVE[:, 1], CURVE[:, 0])
    return np.clip(seconds / 60 * 6000, 16, 27000)


ENGINE = Engine(published_lengths, group=8, devices=2)


def profiled(iterations: int, seed: int, *, even: bool = False) -> Profile:
    rollout = profile_engine(ENGINE, (16, 32, 64), BATCH, iterations=iterations, seed=seed)
    if even:
        rollout = ComponentProfile(rollout.samples)
    laws = {
        "inference": lambda n, b: b * 102.3 / 512 * (64 / n) ** 0.93,
        "train": lambda n, b: b * 367.7 / 512 * (64 / n) ** 0.87,
    }
    rest = {name: ComponentProfile(law=law) for name, law in laws.items()}
    return Profile({"rollout": rollout, **rest})


def spatial() -> Plan:
    inner = Spatial(Leaf("inference", 8), Leaf("train", 24), 32)
    return Plan(Spatial(Leaf("rollout", 32), inner, 32), 64, BATCH)


def test_spatial_prediction_is_within_three_percent_with_three_profiled_iterations():
    reality = Reality({"rollout": ENGINE}, jitter=0.03)
    errors = [
        simulate(spatial(), GRAPH, profiled(3, 50 + seed), reality, iterations=6, seed=seed).error
        for seed in range(4)
    ]
    assert np.mean(np.abs(errors)) < 0.03


def test_even_emission_is_far_too_optimistic():
    reality = Reality({"rollout": ENGINE}, jitter=0.03)
    error = simulate(spatial(), GRAPH, profiled(3, 50, even=True), reality, iterations=4).error
    assert error < -0.15


def test_temporal_prediction_is_within_three_percent():
    plan = temporal_plan(GRAPH, 64, BATCH)
    reality = Reality({"rollout": ENGINE}, jitter=0.03)
    result = simulate(plan, GRAPH, profiled(5, 3), reality, iterations=12)
    assert abs(result.error) < 0.03
    again = simulate(plan, GRAPH, profiled(5, 3), reality, iterations=12)
    assert (result.seconds == again.seconds).all()


def test_an_engine_finishes_every_request_in_order_of_completion():
    engine = Engine(lambda rng, n: np.full(n, 10.0), slots=2, step_s=1.0, request_step_s=0.0)
    out = engine.run(np.random.default_rng(0), 4, 1)
    assert out == pytest.approx([10, 10, 20, 20])
    slow = Engine(lambda rng, n: np.full(n, 10.0), slots=2, step_s=1.0, tool_s=5.0)
    assert (slow.run(np.random.default_rng(0), 4, 1) > out).all()


def test_pictures(tmp_path: Path):
    plan = spatial()
    line = simulate(plan, GRAPH, profiled(1, 0), Reality(), iterations=1).last
    gantt.save_html(plan, line, tmp_path / "plan.html")
    assert "<svg" in (tmp_path / "plan.html").read_text()
    gantt.save_chrome_trace(plan, line, tmp_path / "plan.json")
    spans = load_trace(tmp_path / "plan.json")
    assert {span.name for span in spans} == set(GRAPH.names)
    assert max(s.start + s.seconds for s in spans) == pytest.approx(line.seconds)


def test_png_needs_matplotlib_and_says_so(tmp_path: Path):
    plan = temporal_plan(GRAPH, 4, BATCH)
    line = simulate(plan, GRAPH, profiled(1, 0), Reality(), iterations=1).last
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(SchedError, match=r"rlinf-sched\[plot\]"):
            gantt.save_png(plan, line, tmp_path / "plan.png")
        return
    gantt.save_png(plan, line, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
