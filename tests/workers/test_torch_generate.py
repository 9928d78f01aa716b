import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlinf.workers.engines.backbone import Backbone, backbone_of
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.parameters import WeightsMismatch
from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.engines.sampling import token_logprobs
from rlinf.workers.engines.torch_generate import GenerateConfig, TorchGenerate
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles import FINISH_REASONS, GenerationRequest, RolloutEngine, Sampling

torch.set_num_threads(1)  # several threads on busy cores wait for each other most of the time

VOCABULARY = 23
SAMPLING = Sampling(stop_ids=(2, 3), banned_ids=(0, 1))


def tiny(seed=0):
    model = build_model(ModelSpec(vocab_size=VOCABULARY, hidden_size=32, seed=seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.15)
    return model


def gpt2():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        )
        return GPT2LMHeadModel(config)


def requests(count, sampling=SAMPLING, seed=0):
    rng = random.Random(seed)
    return [
        GenerationRequest(
            uid=f"r{i}",
            prompt_ids=np.array([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]),
            n=rng.randint(1, 5),
            max_new_tokens=rng.randint(1, 30),
            sampling=sampling,
            item=i,
        )
        for i in range(count)
    ]


def by_uid(groups):
    return {group.uid: group for group in groups}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for uid, group in ours.items():
        other = theirs[uid]
        assert np.array_equal(group.tokens, other.tokens), uid
        assert np.array_equal(group.lengths, other.lengths), uid
        assert np.array_equal(group.finish, other.finish), uid
        assert np.allclose(group.logprobs, other.logprobs, atol=1e-5), uid


def test_groups_are_well_formed():
    engine = TorchGenerate(tiny())
    assert isinstance(engine, RolloutEngine)
    asked = {request.uid: request for request in requests(20)}
    groups = list(engine.generate(asked.values()))
    assert sorted(group.uid for group in groups) == sorted(asked)
    for group in groups:
        request = asked[group.uid]
        assert (group.n, group.item) == (request.n, request.item)
        assert group.tokens.dtype == group.lengths.dtype == group.versions.dtype == np.int32
        assert group.logprobs.dtype == np.float32
        assert np.array_equal(group.prompt_ids, request.prompt_ids)
        assert group.tokens.shape == group.logprobs.shape == (group.n, group.lengths.max())
        for i in range(group.n):
            response = group.response(i)
            ended = response[-1] in SAMPLING.stop_ids
            assert group.stopped()[i] == ended
            assert FINISH_REASONS[group.finish[i]] == ("stop" if ended else "length")
            assert ended or len(response) == request.max_new_tokens
            assert not np.isin(response[:-1], SAMPLING.stop_ids).any()
            assert not np.isin(response, SAMPLING.banned_ids).any()
            assert (group.tokens[i, len(response) :] == 0).all()
            assert (group.logprobs[i, len(response) :] == 0).all()
        assert group.token_count == group.lengths.sum()


@pytest.mark.parametrize("make", [tiny, gpt2])
def test_samples_do_not_depend_on_the_batch(make):
    model = make()
    asked = requests(16)
    reference = by_uid(TorchGenerate(model).generate(asked))
    shuffled = random.Random(1).sample(asked, len(asked))
    few_rows = GenerateConfig(max_rows=8)
    little_memory = GenerateConfig(cache_bytes=20_000, prefill_tokens=10)
    for config in (GenerateConfig(), few_rows, little_memory, GenerateConfig(min_rows=1)):
        assert_same(by_uid(TorchGenerate(model, config).generate(shuffled)), reference)
    one_by_one = by_uid(g for r in asked[:6] for g in TorchGenerate(model).generate([r]))
    assert_same(one_by_one, {uid: reference[uid] for uid in one_by_one})


def test_equally_long_prompts_give_the_same_log_probs_to_the_last_bit():
    model = tiny()
    rng = np.random.default_rng(0)
    asked = [
        GenerationRequest(f"r{i}", rng.integers(0, VOCABULARY, 7), 4, 6, SAMPLING)
        for i in range(24)
    ]
    together = by_uid(TorchGenerate(model).generate(asked))
    for request in asked[:8]:
        (alone,) = TorchGenerate(model).generate([request])
        assert np.array_equal(alone.logprobs, together[request.uid].logprobs)


def test_the_seed_the_uid_and_the_sample_decide():
    engine = TorchGenerate(tiny())
    prompt = np.array([5, 6, 7], np.int32)

    def tokens(uid, seed):
        sampling = Sampling(seed=seed)
        (group,) = engine.generate([GenerationRequest(uid, prompt, 8, 12, sampling)])
        return group.tokens

    base = tokens("a", 0)
    assert np.array_equal(base, tokens("a", 0))
    assert not np.array_equal(base, tokens("b", 0))
    assert not np.array_equal(base, tokens("a", 1))
    assert len({row.tobytes() for row in base}) == 8


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_those_of_the_model(temperature):
    model = tiny()
    sampling = Sampling(temperature=temperature, stop_ids=(2,), banned_ids=(0, 1), top_k=9)
    for group in TorchGenerate(model).generate(requests(8, sampling)):
        batch = PrefixBatch.of([(group.prompt_ids, group.tokens, group.lengths)])
        logits, source = backbone_of(model).logits(batch)
        expected = batch.responses.spread(token_logprobs(logits, source, batch.targets, sampling))
        assert np.allclose(group.logprobs, expected.detach().numpy(), atol=2e-5)


def test_greedy_takes_the_likeliest_token():
    model = tiny()
    (group,) = TorchGenerate(model).generate(
        [GenerationRequest("g", np.array([4, 9], np.int32), 2, 6, Sampling(temperature=0))]
    )
    sequence = [4, 9]
    for token in group.tokens[0]:
        assert token == model(torch.tensor([sequence])).logits[0, -1].argmax()
        sequence.append(int(token))
    assert np.array_equal(group.tokens[0], group.tokens[1])


def test_groups_come_in_the_order_in_which_they_complete():
    engine = TorchGenerate(tiny())
    prompt = np.array([5], np.int32)
    lengths = {"long": 40, "short": 2, "middle": 9}
    asked = [GenerationRequest(uid, prompt, 3, n, Sampling()) for uid, n in lengths.items()]
    assert [group.uid for group in engine.generate(asked)] == ["short", "middle", "long"]
    asked.append(GenerationRequest("also short", prompt, 3, 2, Sampling()))
    bursts = [[group.uid for group in groups] for groups in engine.bursts(asked)]
    assert bursts == [["short", "also short"], ["middle"], ["long"]]


def test_the_first_group_does_not_wait_for_the_last():
    engine = TorchGenerate(tiny())
    prompt = np.array([5], np.int32)
    asked = [
        GenerationRequest("long", prompt, 1, 40, Sampling()),
        GenerationRequest("short", prompt, 1, 2, Sampling()),
    ]
    (untouched,) = engine.generate(asked[:1])
    stream = engine.generate(asked)
    assert next(stream).uid == "short"
    engine.load_state({n: p.detach() for n, p in tiny(seed=3).named_parameters()}, version=4)
    (late,) = stream
    assert late.versions.tolist() == [0]
    assert not np.array_equal(late.tokens, untouched.tokens)
    assert np.array_equal(late.tokens[0, :2], untouched.tokens[0, :2])
    (fresh,) = engine.generate(asked[:1])
    assert fresh.versions.tolist() == [4]


def test_requests_with_other_sampling_are_kept_apart():
    engine = TorchGenerate(tiny())
    hot, cold = requests(3, Sampling(temperature=2.0)), requests(3, Sampling(temperature=0.0))
    cold = [
        GenerationRequest(f"cold {r.uid}", r.prompt_ids, r.n, r.max_new_tokens, r.sampling)
        for r in cold
    ]
    mixed = by_uid(engine.generate([x for pair in zip(hot, cold, strict=True) for x in pair]))
    assert_same(mixed, by_uid(engine.generate(hot)) | by_uid(engine.generate(cold)))


def test_weights_are_loaded_all_or_nothing():
    engine = TorchGenerate(tiny())
    before = {name: value.clone() for name, value in engine.state().items()}
    other = {name: value + 1 for name, value in before.items()}
    last = list(other)[-1]
    for broken in (other | {last: torch.zeros(3)}, other | {"unknown": torch.zeros(1)}):
        with pytest.raises(WeightsMismatch):
            engine.load_state(broken, 7)
        assert all(torch.equal(engine.state()[name], before[name]) for name in before)
        assert engine.version == 0
    engine.load_state({last: other[last].bfloat16()}, 7)
    assert engine.version == 7
    assert torch.equal(engine.state()[last], other[last].bfloat16().float())


def test_offload_and_onload_change_nothing():
    engine = TorchGenerate(tiny())
    asked = requests(4)
    reference, size = by_uid(engine.generate(asked)), engine.resident_bytes()
    assert size == sum(p.nbytes for p in engine.model.parameters())
    for _ in range(3):
        engine.offload()
        engine.offload()
        engine.onload()
        engine.onload()
    assert_same(by_uid(engine.generate(asked)), reference)
    assert engine.resident_bytes() == size


def test_a_backbone_can_be_given_another_shape_of_model():
    backbone: Backbone = backbone_of(gpt2())
    assert not backbone.can_join
    assert backbone.bytes_per_token == 2 * 2 * 32 * 4


@pytest.mark.parametrize("bad", [{"n": 0}, {"max_new_tokens": 0}, {"prompt_ids": np.zeros(0)}])
def test_empty_requests_are_refused(bad):
    good = {"uid": "x", "prompt_ids": np.array([1], np.int32)}
    with pytest.raises(ValueError, match="request x"):
        GenerationRequest(**good | bad)


def test_no_requests_give_no_groups():
    assert list(TorchGenerate(tiny()).generate([])) == []


def long_requests(count, sampling=SAMPLING):
    rng = np.random.default_rng(3)
    return [
        GenerationRequest(f"l{i}", rng.integers(4, VOCABULARY, 5 + i), 3, 40, sampling)
        for i in range(count)
    ]


@pytest.mark.parametrize("make", [tiny, gpt2])
def test_what_was_aborted_goes_on_as_if_it_had_not_been(make):
    engine = TorchGenerate(make(), GenerateConfig(max_rows=9))
    asked = [
        *long_requests(6),
        GenerationRequest("short", np.array([5]), 1, 2, SAMPLING),
    ]
    whole = by_uid(engine.generate(asked))
    stream = engine.generate(reversed(asked))
    done = [next(stream)]
    engine.abort()
    cut = list(stream)
    assert sorted(g.uid for g in [*done, *cut]) == sorted(whole)
    aborted = [g for g in cut if "aborted" in {FINISH_REASONS[f] for f in g.finish}]
    assert aborted
    assert any(g.token_count for g in aborted)
    assert any(not g.token_count for g in aborted)
    for group in aborted:
        for i in range(group.n):
            ended = FINISH_REASONS[group.finish[i]] != "aborted"
            length = whole[group.uid].lengths[i] if ended else group.lengths[i]
            assert group.lengths[i] == length
            assert np.array_equal(group.response(i), whole[group.uid].tokens[i, :length])
    resumed = by_uid(engine.generate([group.resumed(40) for group in aborted]))
    assert_same(resumed, {uid: whole[uid] for uid in resumed})


def test_some_requests_can_be_aborted_while_others_go_on():
    engine = TorchGenerate(tiny())
    asked = [*long_requests(3), GenerationRequest("short", np.array([5]), 1, 2, SAMPLING)]
    whole = by_uid(engine.generate(asked))
    stream = engine.generate(asked)
    next(stream)
    engine.abort(["l1"])
    groups = by_uid(stream)
    assert groups["l1"].lengths.max() < whole["l1"].lengths.max()
    del groups["l1"]
    assert_same(groups, {uid: whole[uid] for uid in groups})


def test_a_group_that_had_ended_is_given_back_when_it_is_resumed():
    engine = TorchGenerate(tiny())
    [group] = engine.generate([GenerationRequest("a", np.array([5]), 2, 3, SAMPLING)])
    [again] = engine.generate([group.resumed(9)])
    assert_same({"a": again}, {"a": group})


def test_another_request_cannot_go_on_with_a_group():
    engine = TorchGenerate(tiny())
    [group] = engine.generate([GenerationRequest("a", np.array([5]), 2, 9, SAMPLING)])
    for bad in ({"uid": "b"}, {"prompt_ids": np.array([6])}, {"n": 1}, {"max_new_tokens": 1}):
        with pytest.raises(ValueError, match="another"):
            replace(group.resumed(9), **bad)


def test_new_weights_serve_from_the_next_token_on_and_each_token_knows_its_weights():
    engine = TorchGenerate(tiny())
    prompt = np.array([5], np.int32)
    asked = [GenerationRequest(uid, prompt, 1, n, Sampling()) for uid, n in (("a", 3), ("b", 12))]
    [untouched] = [g for g in engine.generate(asked) if g.uid == "b"]
    assert untouched.token_versions is None
    stream = engine.generate(asked)
    assert next(stream).token_versions is None
    engine.load_state({n: p.detach() for n, p in tiny(seed=3).named_parameters()}, version=4)
    [late] = stream
    assert late.versions.tolist() == [0]
    assert late.token_versions.tolist() == [[0] * 3 + [4] * 9]
    engine.load_state({n: p.detach() for n, p in tiny().named_parameters()}, version=5)
    stream = engine.generate(asked)
    next(stream)
    engine.abort()
    [cut] = stream
    engine.load_state({n: p.detach() for n, p in tiny().named_parameters()}, version=6)
    [whole] = engine.generate([cut.resumed(12)])
    assert whole.token_versions.tolist() == [[5] * 3 + [6] * 9]
    assert np.array_equal(whole.tokens, untouched.tokens)


def letters(ids):
    return "".join(chr(ord("a") + i) for i in ids)


def test_a_response_ends_with_the_token_that_completes_a_stop_string():
    engine = TorchGenerate(tiny(), decode=letters)
    plain = Sampling(seed=1)
    free = by_uid(engine.generate(long_requests(4, plain)))
    strings = tuple(letters(g.tokens[0, 5:7]) for g in free.values())
    ended = 0
    for uid, group in by_uid(
        engine.generate(long_requests(4, replace(plain, stop_strings=strings)))
    ).items():
        for i in range(group.n):
            text = letters(free[uid].response(i))
            ends = [text.find(s) + 2 for s in strings if s in text]
            assert group.lengths[i] == min(ends, default=len(text))
            assert group.stopped()[i] == bool(ends)
            ended += bool(ends)
    assert ended >= 4


def test_stop_strings_need_a_tokenizer():
    [request] = long_requests(1, Sampling(stop_strings=("x",)))
    with pytest.raises(ConfigError, match="stop_ids"):
        next(TorchGenerate(tiny()).generate([request]))
    with pytest.raises(ValueError, match="character"):
        Sampling(stop_strings=("",))
