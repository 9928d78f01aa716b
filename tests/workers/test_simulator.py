"""Environments in processes: what must hold whatever they do."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlinf.workers.engines.mlp_actor import MlpActor, MlpSizes
from rlinf.workers.engines.simulation.fleet import SimulatorConfig
from rlinf.workers.engines.simulation.lane import EnvironmentLost, find_spaces
from rlinf.workers.engines.simulation.seeds import draw_noise, episode_seed
from rlinf.workers.engines.simulation.simulator import ProcessSimulator
from rlinf.workers.engines.simulation.vector import VectorEnvironment
from rlinf.workers.environments import EnvironmentSpec, make_environment
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import CollectRequest, Decision, Field

sys.path.insert(0, str(Path(__file__).parent))
import worlds

COUNTER = MlpSizes(4, (-1.0,), (1.0,), (8,))
DRIFT = MlpSizes(2, (-1.0,), (1.0,), (8,))


def light_actor(sizes):
    count = sum(int(np.prod(shape)) for shape in sizes.shapes())
    return MlpActor(sizes, np.random.default_rng(0).standard_normal(count).astype(np.float32))


class Chunked:
    """An actor that is not light: chunks of three actions 0.1, 0.2, 0.3."""

    noise = "normal"
    noise_size = 1
    choice = Field((), "int16")
    chunk = 3
    light = False

    def act(self, observations, noise):
        count = len(observations["state"])
        actions = np.tile(np.array([0.1, 0.2, 0.3], np.float32)[:, None], (count, 1, 1))
        return Decision(np.zeros(count, np.int16), actions, np.zeros(count, np.float32))


@pytest.fixture
def simulator():
    made = []

    def make(kind="worlds:counter", actor=None, lanes=1, vector=False, **settings):
        options, id = settings.pop("options", {}), settings.pop("id", "world")
        config = SimulatorConfig(**{"environments": 2, "lanes": lanes, "steps": 16} | settings)
        sizes = DRIFT if kind == "worlds:drift" else COUNTER
        spec = EnvironmentSpec(kind, id, options)
        spaces = (worlds.Drift if kind == "worlds:drift" else worlds.Counter).spaces
        if vector:
            made.append(VectorEnvironment(spec, config, spaces=spaces))
        else:
            made.append(ProcessSimulator(spec, config, actor or light_actor(sizes), spaces))
        return made[-1]

    yield make
    for one in made:
        one.close()


def collect(simulator, number=0, steps=16, **kwargs):
    """Trajectories of all lanes, in order of lanes."""
    asked = [CollectRequest(number, lane, steps, **kwargs) for lane in range(simulator.lanes)]
    found = dict(simulator.collect(asked))
    return [found[lane] for lane in range(simulator.lanes)]


def test_what_an_episode_ended_with_is_kept_though_its_array_is_reused(simulator):
    [one] = collect(simulator(options={"length": 5, "limit": 7}))
    assert one.ends.tolist() == [[t, e] for t in (4, 9, 14) for e in (0, 1)]
    assert one.finals["state"][:, 1].tolist() == [5] * 6
    after = one.observations["state"][[5, 10, 15]]
    assert (after[..., 1] == 0).all()
    assert one.terminated.sum() == 6
    assert not one.truncated.any()


def test_a_time_limit_truncates_and_an_end_of_its_own_terminates(simulator):
    [one] = collect(simulator(options={"length": 100, "limit": 5}))
    assert one.truncated[[4, 9, 14]].all()
    assert not one.terminated.any()
    [both] = collect(simulator(options={"length": 5, "limit": 5}))
    assert both.terminated[[4, 9, 14]].all()
    assert not both.truncated.any(), "both at once: there is nothing to bootstrap from"


def test_actions_of_a_chunk_after_the_end_are_not_carried_out(simulator):
    one = simulator(actor=Chunked(), options={"length": 4, "spread": 3}, environments=4)
    seeds = (1000, 1001, 1002, 1003)  # 5, 6, 4, 5 steps
    [found] = collect(one, steps=4, seeds=seeds)
    assert found.steps.T.tolist() == [[3, 2, 0, 0], [3, 3, 0, 0], [3, 1, 0, 0], [3, 2, 0, 0]]
    assert found.rewards.sum(0).tolist() == [5, 6, 4, 5]
    assert found.valid.T.tolist() == [[True, True, False, False]] * 4
    assert found.finals["state"][:, 2].round(1).tolist() == pytest.approx([0.2, 0.3, 0.1, 0.2])
    assert found.token_count == 20


def test_a_success_counts_once_an_episode(simulator):
    one = simulator(actor=Chunked(), options={"length": 4}, environments=3)
    [found] = collect(one, steps=4, seeds=(1, 2, 3))
    assert [episode.success for episode in found.episodes] == [True] * 3
    assert (one.statistics().successes, one.statistics().episodes) == (3, 3)


def test_an_environment_is_reset_once_an_episode(simulator):
    one = simulator(options={"length": 4})
    by_itself, again = (collect(one, number)[0] for number in range(2))
    resets = [*by_itself.observations["state"][:, 0, 3], *again.observations["state"][1:, 0, 3]]
    assert resets == [1 + t // 4 for t in range(33)]


def test_a_manual_reset_after_the_end_resets_once(simulator):
    one = simulator(vector=True, options={"length": 2})
    shown = one.reset({0: 5, 1: 6}, rests=True)
    before = shown["state"][:, 3].tolist()
    action = np.zeros((2, 1, 1), np.float32)
    one.step(action)
    _, facts = one.step(action)
    assert facts["terminated"].all()
    _, facts = one.step(action)
    assert not facts["valid"].any(), "they rest"
    shown = one.reset({0: 7, 1: 8}, rests=True)
    assert shown["state"][:, 3].tolist() == [count + 1 for count in before]


def test_a_partial_reset_changes_those_rows_only(simulator):
    one = simulator(vector=True, lanes=2, environments=4)
    one.reset({index: index for index in range(4)})
    one.step(np.full((4, 1, 1), 0.5, np.float32))
    shown, _ = one.step(np.full((4, 1, 1), 0.5, np.float32))
    before = shown["state"].copy()
    after = one.reset({1: 11, 3: 33})["state"]
    assert np.array_equal(after[[0, 2]], before[[0, 2]])
    assert after[[1, 3], 0].tolist() == [11, 33]
    assert after[[1, 3], 1].tolist() == [0, 0]


@pytest.mark.parametrize("lanes", [2, 3, 8])
def test_trajectories_do_not_depend_on_how_environments_are_split(simulator, lanes):
    whole, parts = (simulator("worlds:drift", lanes=n, environments=8) for n in (1, lanes))
    for number in range(3):
        [together] = collect(whole, number)
        apart = collect(parts, number)
        for name in ("choices", "logprobs", "rewards", "terminated", "truncated", "valid"):
            joined = np.concatenate([getattr(one, name) for one in apart], 1)
            assert np.array_equal(joined, getattr(together, name)), name
        shown = np.concatenate([one.observations["state"] for one in apart], 1)
        assert np.array_equal(shown, together.observations["state"])


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("seeds", [False, True])
def test_those_that_are_simulated_together_do_what_single_ones_do(simulator, lanes, seeds):
    kinds = (
        ("worlds:drift", {}),
        ("worlds:counter", {"length": 4, "spread": 3}),
        ("worlds:counter", {"length": 99, "limit": 5}),
    )
    for kind, options in kinds:
        made = {"lanes": lanes, "environments": 7, "options": options}
        actor = None if kind == "worlds:drift" else Chunked()
        single, together = (simulator(kind, actor, id=i, **made) for i in ("one", "together"))
        for number in range(2):
            pairs = []
            for one in (single, together):
                places = [one.lane_environments(lane) for lane in range(lanes)]
                asked = [
                    CollectRequest(number, lane, 8, tuple(50 + i for i in own) if seeds else ())
                    for lane, own in enumerate(places)
                ]
                found = dict(one.collect(asked))
                pairs.append([found[lane] for lane in range(lanes)])
            for left, right in zip(*pairs, strict=True):
                same(left, right)
        assert single.statistics() == together.statistics()


def same(left, right):
    """Trajectories that differ in nothing but, for `Counter`, the number of resets at the start."""
    names = ("choices", "logprobs", "rewards", "terminated", "truncated", "valid", "steps", "ends")
    for name in (*names, "seeds"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    for one, other in ((left.observations, right.observations), (left.finals, right.finals)):
        assert np.array_equal(one["state"][..., :3], other["state"][..., :3])
    assert left.episodes == right.episodes


def test_a_stuck_batch_is_replaced_as_a_whole(simulator, tmp_path):
    options = {"fault": "stuck", "at": 6, "mark": str(tmp_path / "mark")}
    made = {"id": "together", "lanes": 2, "environments": 4, "deadline_s": 0.5}
    one = simulator(options=options, **made)
    found = collect(one)
    [struck] = [t for t in found if not t.valid.all()]
    assert struck.valid.sum(0).tolist() == [5, 5]
    assert [e.lost for e in struck.episodes] == [True, True]
    assert all(t.valid.all() for t in collect(one, 1))


def test_where_the_actor_acts_makes_no_difference(simulator):
    inside = light_actor(DRIFT)
    outside = light_actor(DRIFT)
    outside.light = False
    found = [
        collect(simulator("worlds:drift", actor, lanes=2, environments=8))
        for actor in (inside, outside)
    ]
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one.observations["state"], other.observations["state"])
        assert np.array_equal(one.choices, other.choices)


def test_greedy_takes_the_likeliest(simulator):
    one = simulator("worlds:drift")
    first, second = (collect(one, n, seeds=(1, 2), greedy=True)[0] for n in range(2))
    assert np.array_equal(first.choices, second.choices)
    noisy, other = (collect(one, n, seeds=(1, 2))[0] for n in range(2))
    assert not np.array_equal(noisy.choices, other.choices)


def test_new_weights_act_from_the_next_collect_on(simulator):
    actor = light_actor(DRIFT)
    one = simulator("worlds:drift", actor)
    [before] = collect(one, seeds=(1, 2), greedy=True)
    actor.load(actor.weights() * 2)
    [after] = collect(one, seeds=(1, 2), greedy=True)
    assert np.array_equal(before.observations["state"][0], after.observations["state"][0])
    assert not np.array_equal(before.choices[0], after.choices[0])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", "ended by signal 9"),
        ("raises", "the gripper is jammed"),
        ("stuck", "at one call for more than 0.5 s"),
    ],
)
def test_a_lost_process_costs_its_episodes_only(simulator, tmp_path, caplog, fault, said):
    mark = str(tmp_path / "mark")
    options = {"length": 9, "fault": fault, "at": 6, "mark": mark}
    one = simulator(lanes=2, environments=4, options=options, deadline_s=0.5, actor=None)
    with caplog.at_level(logging.WARNING):
        found = collect(one)
    [struck] = [t for t in found if not t.valid.all()]
    [whole] = [t for t in found if t.valid.all()]
    assert whole.valid.all()
    assert struck.valid.sum(0).tolist() == [5, 5]
    assert struck.truncated.sum() == 2
    assert struck.finals["state"][:, 1].tolist() == [5, 5], "the last that was seen stands for more"
    assert [e.lost for e in struck.episodes] == [True, True]
    [warning] = caplog.messages
    assert said in warning
    assert f"environment {struck.environments[0]} (worlds:counter:world, process " in warning
    again = collect(one, 1)
    assert all(t.valid.all() for t in again)
    counts = one.statistics()
    assert (counts.lost_processes, counts.lost_episodes) == (1, 2)


def test_a_process_that_is_killed_between_two_collects_is_replaced(simulator):
    one = simulator(lanes=2, environments=4)
    collect(one)
    before = one.pids
    os.kill(before[1], signal.SIGKILL)
    first, second = collect(one, 1)
    assert first.valid.all()
    assert one.pids[0] == before[0]
    assert one.pids[1] != before[1]
    assert second.valid.all() or not second.valid.any()


def test_an_environment_that_always_fails_is_named(simulator):
    one = simulator(options={"fault": "raises", "at": 1}, restarts=2)
    with pytest.raises(EnvironmentLost, match=r"environment 0 .*the gripper is jammed.*3 times"):
        for number in range(9):
            collect(one, number)


def test_a_stuck_one_in_the_vector_is_replaced_and_masked(simulator, tmp_path):
    options = {"fault": "stuck", "at": 2, "mark": str(tmp_path / "mark")}
    one = simulator(vector=True, lanes=2, environments=2, options=options, deadline_s=0.5)
    one.reset({0: 1, 1: 2})
    action = np.zeros((2, 1, 1), np.float32)
    one.step(action)
    _, facts = one.step(action)
    assert sorted(facts["valid"].tolist()) == [False, True]
    one.step(action)
    _, facts = one.step(action)
    assert facts["valid"].all()


def test_nothing_is_left_after_closing(simulator):
    one = simulator(lanes=2)
    pids = one.pids
    collect(one)
    one.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline


def test_what_shows_nothing_new_is_not_copied(simulator):
    one = simulator(vector=True, environments=2)
    first = one.reset({0: 1, 1: 2})["state"]
    action = np.zeros((2, 1, 1), np.float32)
    second, _ = one.step(action)
    third, _ = one.step(action)
    assert first.base is not None
    assert np.shares_memory(second["state"], third["state"])


def test_requests_that_make_no_sense_are_refused(simulator):
    one = simulator(lanes=2, environments=4)
    for asked in (
        [CollectRequest(0, 0, 4), CollectRequest(0, 0, 4)],
        [CollectRequest(0, 2, 4)],
        [CollectRequest(0, 0, 17)],
        [CollectRequest(0, 0, 4, seeds=(1,))],
    ):
        with pytest.raises(ValueError, match=r"lanes|steps"):
            list(one.collect(asked))


def test_a_world_that_cannot_be_made_says_why():
    with pytest.raises(EnvironmentLost, match="no such world"):
        find_spaces(EnvironmentSpec("worlds:broken", "x"), 60)
    with pytest.raises(ConfigError, match="'nowhere' is not installed; there are: gymnasium"):
        make_environment(EnvironmentSpec("nowhere", "x"))


def test_random_numbers_depend_on_their_place_alone():
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = [draw_noise(place, "normal", (4, 2)).tobytes() for place in places]
    assert len(set(drawn)) == 4
    assert draw_noise((0, 0, 0), "normal", (4, 2)).tobytes() == drawn[0]
    uniform = draw_noise((0, 0, 0), "uniform", (99, 2))
    assert uniform.min() >= 0 and uniform.max() < 1
    assert len({episode_seed(0, e, n) for e in range(9) for n in range(9)}) == 81
