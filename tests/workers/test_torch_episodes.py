"""Episodes on the engine: what it records, in what company, and who waits for whom."""

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.engines.sampling import token_logprobs
from rlinf.workers.engines.torch_episodes import EpisodeConfig, TorchEpisodes
from rlinf.workers.engines.torch_generate import GenerateConfig
from rlinf.workers.episodes.episode import EpisodeLimits
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles import OUTCOMES, RolloutEngine
from rlinf.workers.tools.box import ToolBox, ToolConfig
from tests.workers.episode_rig import CODEC, LANGUAGE, SAMPLING, random_model, request

torch.set_num_threads(1)  # several threads on busy cores wait for each other most of the time

COUNT = 24
LIMITS = EpisodeLimits(calls=3, observation_tokens=60, tokens=300)
MODEL = random_model()


class Echo:
    def call(self, arguments, timeout_s):
        return [f"{len(a)} <answer>no</answer> Paris is the capital" for a in arguments]


def requests(count):
    rng = random.Random(0)
    prompts = ("who wrote it?", "Paris", "the capital of France is")
    return [request(f"r{i}", rng.randint(6, 12), 60, rng.choice(prompts)) for i in range(count)]


def rollout(asked, tool=None, **config):
    with ToolBox({"search": tool or Echo()}) as box:
        settings = EpisodeConfig(LIMITS, **config)
        groups = list(TorchEpisodes(MODEL, settings, LANGUAGE, box).generate(asked))
        return {group.uid: group for group in groups}, box.statistics()


@pytest.fixture(scope="module")
def reference():
    return rollout(requests(COUNT))


def test_episodes_are_well_formed(reference):
    groups, calls = reference
    assert sorted(groups) == sorted(r.uid for r in requests(COUNT))
    facts = [group.episodes for group in groups.values()]
    assert sum(int(f.calls.sum()) for f in facts) == calls.calls > 10
    seen = {OUTCOMES[o] for f in facts for o in f.outcome}
    assert seen >= {"answered", "budget", "format_error"}, "the test looks at too little"
    for group in groups.values():
        for i in range(group.n):
            text, own = CODEC.decode(group.response(i)), CODEC.decode(group.own(i))
            answers = int(group.episodes.calls[i] + group.episodes.invalid[i])
            shown = text.count("Paris is the capital") - own.count("Paris is the capital")
            assert shown == group.episodes.calls[i]
            assert answers <= LIMITS.calls
            assert group.lengths[i] + len(group.prompt_ids) <= LIMITS.tokens
            assert group.written_lengths[i] <= 60
            assert group.written[i, : group.lengths[i]][0]


def test_the_log_probs_are_those_of_a_forward_pass_over_the_whole_record(reference):
    """So the cache that is kept across turns holds what reading everything again would give."""
    engine = TorchEpisodes(MODEL, EpisodeConfig(LIMITS), LANGUAGE, ToolBox({"search": Echo()}))
    worst = 0.0
    for group in reference[0].values():
        batch = PrefixBatch.of([(group.prompt_ids, group.tokens, group.lengths)])
        logits, source = engine._backbone.logits(batch)
        logprobs = token_logprobs(logits, source, batch.targets, SAMPLING)
        again = batch.responses.spread(logprobs).detach().numpy()
        worst = max(worst, float(np.abs(again - group.logprobs)[group.trainable].max()))
    assert worst < 1e-4


def test_episodes_do_not_depend_on_their_company(reference):
    asked = requests(COUNT)
    shuffled = random.Random(1).sample(asked, len(asked))
    for settings in (
        {"engine": GenerateConfig(max_rows=40)},
        {"engine": GenerateConfig(cache_bytes=100_000, prefill_tokens=12)},
        {"gather_steps": 0},
    ):
        groups, _ = rollout(shuffled, **settings)
        for uid, group in reference[0].items():
            assert np.array_equal(groups[uid].tokens, group.tokens), (uid, settings)
            assert np.array_equal(groups[uid].written, group.written), (uid, settings)
    alone, _ = rollout(asked[3:4])
    assert np.array_equal(alone["r3"].tokens, reference[0]["r3"].tokens)


def test_nobody_waits_for_the_tool_of_another(reference):
    """The first call is answered only when all groups without it have come out."""

    class Holding(Echo):
        def __init__(self):
            self.lock, self.held, self.gate = threading.Lock(), False, threading.Event()

        def call(self, arguments, timeout_s):
            with self.lock:
                holds, self.held = not self.held, True
            if holds:
                assert self.gate.wait(60)
            return super().call(arguments, timeout_s)

    holding, asked = Holding(), requests(COUNT)
    config = ToolConfig(deadline_s=60.0, batch=1, threads=4)
    with ToolBox({"search": holding}, config) as box:
        engine = TorchEpisodes(MODEL, EpisodeConfig(LIMITS), LANGUAGE, box)
        groups = engine.generate(asked)
        out = [next(groups) for _ in range(len(asked) - 1)]
        holding.gate.set()
        out += groups
    for group in out:
        assert np.array_equal(group.tokens, reference[0][group.uid].tokens), group.uid


def test_tools_that_fail_are_counted_and_end_nothing():
    class Dead:
        def call(self, arguments, timeout_s):
            raise OSError("gone")

    groups, calls = rollout(requests(COUNT), Dead())
    assert len(groups) == COUNT and calls.failed == calls.calls > 0
    facts = [group.episodes for group in groups.values()]
    assert sum(int(f.failed.sum()) for f in facts) == calls.failed
    assert any(f.ended("tool_failure").any() for f in facts)


def test_leaving_early_forgets_the_calls_under_way():
    entered, gate = threading.Event(), threading.Event()

    class Waiting(Echo):
        def call(self, arguments, timeout_s):
            entered.set()
            gate.wait(60)
            return super().call(arguments, timeout_s)

    with ToolBox({"search": Waiting()}) as box:
        groups = TorchEpisodes(MODEL, EpisodeConfig(LIMITS), LANGUAGE, box).generate(
            requests(COUNT)
        )
        next(groups)
        assert entered.wait(30)
        groups.close()
        gate.set()
        assert box.collect(0.0) == []


def test_a_model_that_cannot_be_joined_is_refused():
    config = GPT2Config(vocab_size=CODEC.size, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        TorchEpisodes(GPT2LMHeadModel(config), EpisodeConfig(), LANGUAGE, ToolBox({}))


def test_what_episodes_cannot_do_is_refused():
    elsewhere = EpisodeConfig(engine=GenerateConfig(name="sglang"))
    with pytest.raises(ConfigError, match="on torch only"):
        TorchEpisodes(MODEL, elsewhere, LANGUAGE, ToolBox({}))
    engine = TorchEpisodes(MODEL, EpisodeConfig(LIMITS), LANGUAGE, ToolBox({"search": Echo()}))
    asked = replace(request(0), sampling=replace(SAMPLING, stop_strings=("x",)))
    with pytest.raises(ConfigError, match="stop_strings"):
        list(engine.generate([asked]))


def test_it_is_a_rollout_engine():
    box = ToolBox({"search": Echo()})
    assert isinstance(TorchEpisodes(MODEL, EpisodeConfig(), LANGUAGE, box), RolloutEngine)
