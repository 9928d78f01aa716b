"""A rollout that calls a tool on another worker, and learns from what it wrote itself."""

import threading

import numpy as np
import pytest

from rlinf.workers import Cluster, wait_all
from rlinf.workers.engines.episode_reward import EpisodeReward
from rlinf.workers.engines.models import ModelSpec
from rlinf.workers.engines.torch_episodes import EpisodeConfig
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.episodes.episode import EpisodeLimits
from rlinf.workers.hosts import RewardWorker, TrainerWorker
from rlinf.workers.roles import Score, ScoredGroup, ToolFailed
from rlinf.workers.tool_hosts import EpisodeWorker, RemoteTool, ToolAccess, ToolWorker
from rlinf.workers.tools.box import ToolConfig
from tests.workers.episode_rig import CODEC, LANGUAGE, random_model, request

SPEC = ModelSpec(vocab_size=CODEC.size, hidden_size=32)
CONFIG = EpisodeConfig(EpisodeLimits(calls=3, observation_tokens=40, tokens=300))
PATIENT = ToolConfig(deadline_s=30.0, tries=2, pause_s=0.01)


class Echo:
    def call(self, arguments, timeout_s):
        return [f"seen {argument}" for argument in arguments]


class Unwilling:
    def __init__(self, error):
        self.error = error

    def call(self, arguments, timeout_s):
        raise self.error


def language():
    return LANGUAGE


def reward():
    return EpisodeReward(LANGUAGE, {-1: ["Paris"]})


def step(cluster, make_tool, config=PATIENT):
    """One step of training: what was scored, and the trainer's report."""
    trainer = TrainerWorker.group(cluster, SPEC, TrainerConfig(), name="trainer").launch()
    tool = ToolWorker.group(cluster, make_tool, name="search").launch()
    rollout = EpisodeWorker.group(
        cluster,
        SPEC,
        CONFIG,
        "trainer/0",
        language,
        ToolAccess({"search": "search/0"}, config),
        name="rollout",
    ).launch()
    judge = RewardWorker.group(cluster, reward, name="reward").launch()
    tool.wait_ready()
    [version] = trainer.publish().result(None)
    rollout.load_weights(version).result(None)
    asked, episodes, scored = cluster.channels(1, "asked", "episodes", "scored")
    asked.put_many([request(f"r{i}", 8) for i in range(24)])
    asked.close()
    calls = [
        rollout.generate(asked, episodes),
        judge.score(episodes, scored),
        trainer.train(scored),
    ]
    reports = wait_all(calls)
    [statistics] = rollout.tool_statistics().result(60)
    return reports, statistics


def test_a_step_with_a_tool_on_another_worker():
    with Cluster(launcher="inline") as cluster:
        reports, statistics = step(cluster, Echo)
    counted = reports[2][0].result.parts.episodes
    assert counted.episodes == 24 * 8
    assert counted.calls == statistics.calls > 0 and statistics.failed == 0
    assert counted.tool_s > 0
    assert 0 <= reports[0][0].idle_s <= reports[0][0].seconds
    metrics = reports[2][0].result.metrics()
    assert metrics["calls"] == counted.calls / counted.episodes
    assert metrics["tokens"] == reports[0][0].tokens, "what tools wrote is not counted"


@pytest.mark.parametrize("error", [ToolFailed("no connection"), RuntimeError("a defect")])
def test_a_tool_that_never_works_stops_nothing(error):
    with Cluster(launcher="inline") as cluster:
        reports, statistics = step(cluster, lambda: Unwilling(error))
    parts = reports[2][0].result.parts
    assert statistics.failed == statistics.calls == parts.episodes.failed > 0
    assert parts.unscored > 0 and parts.scored + parts.unscored == 24 * 8


def test_a_tool_that_hangs_stops_nothing():
    gate = threading.Event()

    class Hanging(Echo):
        def call(self, arguments, timeout_s):
            gate.wait(60)
            return super().call(arguments, timeout_s)

    try:
        with Cluster(launcher="inline") as cluster:
            reports, statistics = step(cluster, Hanging, ToolConfig(deadline_s=0.3))
    finally:
        gate.set()
    parts = reports[2][0].result.parts
    assert statistics.failed == statistics.calls == parts.episodes.failed > 0
    assert reports[0][0].idle_s > 0


def test_a_worker_that_is_busy_says_so():
    gate, inside = threading.Event(), threading.Event()

    class Holding(Echo):
        def call(self, arguments, timeout_s):
            inside.set()
            gate.wait(60)
            return super().call(arguments, timeout_s)

    with Cluster(launcher="inline") as cluster:
        ToolWorker.group(cluster, Holding, threads=1, name="search").launch().wait_ready(60)
        remote = RemoteTool(cluster.endpoint, "search/0")
        answers = []
        first = threading.Thread(target=lambda: answers.append(remote.call(["a"], 60.0)))
        first.start()
        assert inside.wait(30)
        with pytest.raises(ToolFailed, match="busy"):
            remote.call(["b"], 30.0)
        gate.set()
        first.join()
        assert answers == [["seen a"]]


def test_nobody_there_is_a_failure():
    with Cluster(launcher="inline") as cluster:
        remote = RemoteTool(cluster.endpoint, "nobody/0")
        with pytest.raises(ToolFailed, match="nobody/0 cannot be reached"):
            remote.call(["a"], 0.3)


def test_the_gradient_does_not_see_what_tools_wrote():
    """Other numbers under the mask change nothing; the tokens there are only context."""
    from dataclasses import replace

    from rlinf.workers.engines.torch_episodes import TorchEpisodes
    from rlinf.workers.tools.box import ToolBox

    model = random_model()
    with ToolBox({"search": Echo()}) as box:
        engine = TorchEpisodes(model, CONFIG, LANGUAGE, box)
        groups = list(engine.generate([request(f"r{i}", 8) for i in range(24)]))
    groups = [g for g in groups if g.trainable.sum() != g.lengths.sum()]
    assert groups
    norms = []
    for noise in (0.0, 3.0):
        trainer = TorchTrainer(model, TrainerConfig())
        for group in groups:
            logprobs = np.where(group.trainable, group.logprobs, group.logprobs - noise)
            scores = [Score(float(i % 2)) for i in range(group.n)]
            changed = replace(group, logprobs=logprobs.astype(np.float32))
            trainer.accumulate([ScoredGroup.of(changed, scores)])
        parts = trainer._parts
        stats = trainer.finish_step()
        norms.append((stats.grad_norm, stats.parts.loss))
        assert stats.parts.trained_tokens == sum(int(g.trainable.sum()) for g in groups)
        assert parts is not None
        model.load_state_dict(random_model().state_dict())
    assert norms[0] == norms[1] and norms[0][0] > 0
