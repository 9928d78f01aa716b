"""A policy in a worker of its own, in a ring with the simulator."""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlinf.sched import Leaf, Loop, Plan, Temporal
from rlinf.workers import Cluster, FlowPlanner, wait_all
from rlinf.workers.devices import local_cores
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.policies import PolicySpec, build_policy
from rlinf.workers.engines.policy_trainer import PolicyTrainerConfig
from rlinf.workers.engines.simulation.fleet import SimulatorConfig
from rlinf.workers.engines.simulation.simulator import ProcessSimulator
from rlinf.workers.engines.simulation.stepped import ActorElsewhere, SteppedSimulator
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.roles.simulator import Acted, CollectRequest, Shown, Trajectory
from rlinf.workers.simulation_hosts import (
    ActorWorker,
    PolicyTrainerWorker,
    SimulatorWorker,
    SteppedSimulatorWorker,
)

sys.path.insert(0, str(Path(__file__).parent))
import worlds

SPEC = EnvironmentSpec("worlds:drift", "")
SPACES = worlds.Drift.spaces
SETTINGS = SimulatorConfig(environments=4, lanes=2, steps=6)
LEARNING = PolicyTrainerConfig(
    optimiser=OptimiserConfig(lr=1e-3, warmup_steps=0), epochs=2, minibatch=16
)
needs_two_cores = pytest.mark.skipif(len(local_cores()) < 2, reason="one core only")


def make_policy(spaces):
    return build_policy(PolicySpec(hidden=(8,), std=0.5), spaces)


ACTOR = make_policy(SPACES).actor()


@pytest.fixture
def stepped():
    made = []

    def make(spec=SPEC, spaces=SPACES, **settings):
        config = replace(SETTINGS, **settings)
        made.append(SteppedSimulator(spec, config, ActorElsewhere.of(ACTOR), spaces))
        return made[-1]

    yield make
    for one in made:
        one.close()


def answered(shown, version=3):
    return Acted(shown.request, shown.t, ACTOR.act(shown.observations, shown.noise), version)


def driven(simulator, requests):
    """The requests' trajectories by lane, lanes in turn, whoever is ready."""
    going, found = list(requests), {}
    while going:
        answers = simulator.advance(going)
        going = [answered(one) for one in answers if isinstance(one, Shown)]
        found |= {int(t.uid.split(".")[1]): t for t in answers if isinstance(t, Trajectory)}
    return found


def test_trajectories_are_those_of_a_policy_inside(stepped):
    actor = make_policy(SPACES).actor()
    actor.light = False
    inside = ProcessSimulator(SPEC, SETTINGS, actor, SPACES)
    for number in range(3):
        asked = [CollectRequest(number, lane, 6) for lane in range(2)]
        if number == 0:
            simulator = stepped()
        apart, together = driven(simulator, asked), dict(inside.collect(asked))
        for lane in range(2):
            for name in ("choices", "logprobs", "rewards", "terminated", "truncated", "valid"):
                assert np.array_equal(getattr(apart[lane], name), getattr(together[lane], name)), (
                    name
                )
            shown = (one.observations["state"] for one in (apart[lane], together[lane]))
            assert np.array_equal(*shown)
            assert apart[lane].version == 3
    inside.close()


def test_lanes_that_are_not_asked_stay_as_they_are(stepped):
    simulator = stepped()
    first, second = simulator.advance([CollectRequest(0, lane, 6) for lane in range(2)])
    [after] = simulator.advance([answered(first)])
    assert (after.t, second.t) == (1, 0)
    [later] = simulator.advance([answered(second)])
    assert later.t == 1 and later.request.lane == 1
    with pytest.raises(ValueError, match="each of 0 to 1 once"):
        simulator.advance([answered(later), answered(later)])


def test_a_lane_lost_in_mid_request_ends_with_what_it_had(stepped, caplog):
    simulator = stepped()
    going = simulator.advance([CollectRequest(0, lane, 6) for lane in range(2)])
    going = simulator.advance([answered(one) for one in going])
    os.kill(simulator.pids[1], signal.SIGKILL)
    whole, struck = simulator.advance([answered(one) for one in going])
    assert isinstance(whole, Shown) and isinstance(struck, Trajectory)
    assert struck.valid.sum(0).tolist() == [1, 1]
    assert [episode.lost for episode in struck.episodes] == [True, True]
    [message] = caplog.messages
    assert "ended by signal 9" in message
    [again] = simulator.advance([CollectRequest(1, 1, 6)])
    assert isinstance(again, Shown) and again.t == 0


def test_a_decision_for_what_nobody_knows_any_more_is_answered_by_nothing(stepped):
    before, after = stepped(), stepped()
    [shown, _] = before.advance([CollectRequest(0, lane, 6) for lane in range(2)])
    [empty] = after.advance([answered(shown)])
    assert isinstance(empty, Trajectory) and not empty.valid.any()
    assert all(episode.lost for episode in empty.episodes)
    [begun] = after.advance([CollectRequest(1, 0, 6)])
    assert isinstance(begun, Shown)


def iterations(plan, apart, steps=3):
    """What was learnt in each, in the same environments, however the policy acts."""
    with Cluster(launcher="inline") as cluster:
        trainer = PolicyTrainerWorker.group(
            cluster, SPACES, LEARNING, make_policy, name="trainer"
        ).launch()
        if apart:
            actor = ActorWorker.group(
                cluster, SPACES, make_policy, "trainer/0", name="policy"
            ).launch()
            [outline] = actor.outline().result(60)
            simulator = SteppedSimulatorWorker.group(
                cluster, SPEC, SETTINGS, outline, SPACES, name="simulator"
            ).launch()
        else:
            simulator = actor = SimulatorWorker.group(
                cluster, SPEC, SETTINGS, make_policy, "trainer/0", SPACES, name="simulator"
            ).launch()
        found, records = [], []
        cluster.add_sink(records.append)
        for step in FlowPlanner(cluster, plan).steps(range(1, steps + 1)):
            actor.load_weights(trainer.publish().result(60)[0]).result(60)
            asked, made = cluster.channels(step, "asked", "made")
            asked.put_many([CollectRequest(step, lane, 6) for lane in range(2)])
            asked.close()
            if apart:
                ring = cluster.ring(step, "shown", "decided")
                acting = [simulator.step(asked, made, ring), actor.act(*ring)]
            else:
                acting = [simulator.collect(asked, made)]
            *_, [report] = wait_all([*acting, trainer.train(made)], timeout=60)
            stats = report.result
            assert stats.steps == 24
            found.append((stats.policy_loss, stats.value_loss, stats.kl, stats.grad_norm))
    return found, records


def in_turn():
    loop = Loop((Leaf("simulator", 2), Leaf("policy", 2)), 6)
    return Plan(Temporal(loop, Leaf("trainer", 2)), local_cores()[:2], 2)


def alternating():
    loop = Loop((Leaf("simulator", 1), Leaf("policy", 1)), 6, 2)
    return Plan(Temporal(loop, Leaf("trainer", 2)), local_cores()[:2], 2)


@needs_two_cores
@pytest.mark.timeout(240)
def test_every_execution_learns_the_same():
    expected, _ = iterations("temporal", apart=False)
    for plan in ("temporal", in_turn(), alternating()):
        found, records = iterations(plan, apart=True)
        assert np.allclose(found, expected, rtol=1e-3), plan
    acted = [r for r in records if r.group == "policy" and r.iteration == 3]
    assert [r.items_in for r in acted] == [1] * 12, "two groups of environments went round"
    stepped = [r for r in records if r.group == "simulator" and r.iteration == 3]
    both = partial(_overlaps, acted)
    assert any(map(both, stepped)), "while one group is acted for, the other steps"


def _overlaps(acted, record):
    return any(one.start < record.end and record.start < one.end for one in acted)
