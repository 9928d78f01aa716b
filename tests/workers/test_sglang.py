"""The SGLang engine against a server that speaks its protocol, and, given a GPU, the real one."""

import json
import queue
import threading

import numpy as np
import pytest
import torch

from rlinf.workers import Cluster, wait_all
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.sglang.config import SglangConfig
from rlinf.workers.engines.sglang.engine import SglangGenerate, make
from rlinf.workers.engines.sglang.servers import EngineServer, HttpServer
from rlinf.workers.engines.sglang.wire import SglangRefused, check_done
from rlinf.workers.engines.torch_generate import GenerateConfig, TorchGenerate
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.hosts import RolloutWorker, TrainerWorker
from rlinf.workers.roles import FINISH_REASONS, GenerationRequest, RolloutEngine, Sampling
from tests.workers.sglang_server import FakeSglang, running

SAMPLING = Sampling(
    temperature=0.7, top_p=0.9, min_p=0.1, stop_ids=(3,), stop_strings=("x",), banned_ids=(0, 9)
)


def weights():
    return {"a": torch.zeros(3, 2), "b": torch.zeros(4), "c": torch.zeros(5, dtype=torch.bfloat16)}


@pytest.fixture
def fake():
    with running(FakeSglang(weights())) as server:
        yield server


def engine_of(fake, **options):
    return SglangGenerate(HttpServer(fake.url, timeout_s=30), **options)


def requests(count, tokens=20):
    return [
        GenerationRequest(f"r{i}", np.arange(4, 7 + i, dtype=np.int32), 2, tokens, SAMPLING, i)
        for i in range(count)
    ]


def by_uid(groups):
    return {group.uid: group for group in groups}


def test_ids_go_in_and_ids_with_their_log_probs_come_out(fake):
    engine = engine_of(fake)
    assert isinstance(engine, RolloutEngine)
    groups = by_uid(engine.generate(requests(5)))
    assert sorted(groups) == [f"r{i}" for i in range(5)]
    for i, group in enumerate(groups[f"r{i}"] for i in range(5)):
        assert (group.item, group.n, group.sampling) == (i, 2, SAMPLING)
        assert group.tokens.dtype == group.lengths.dtype == group.versions.dtype == np.int32
        for sample in range(2):
            response = group.response(sample)
            stopped = response[-1] == 3
            assert FINISH_REASONS[group.finish[sample]] == ("stop" if stopped else "length")
            assert np.allclose(
                group.logprobs[sample, : len(response)], -0.5 - np.arange(len(response))
            )
    assert {bool(g.stopped().any()) for g in groups.values()} == {True, False}
    sent = [body for name, body in fake.asked if name == "generate"]
    assert len(sent) == 10
    assert sent[0]["sampling_params"] == {
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 0.9,
        "min_p": 0.1,
        "stop_token_ids": [3],
        "stop": ["x"],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "logit_bias": {"0": -1e9, "9": -1e9},
        "max_new_tokens": 20,
    }


def test_what_was_aborted_goes_on_where_it_was_cut_off(fake):
    engine = engine_of(fake)
    fake.hold_after = 4
    asked = [GenerationRequest("a", np.array([1, 2]), 3, 9, Sampling())]
    found = []
    reader = threading.Thread(target=lambda: found.extend(engine.generate(asked)))
    reader.start()
    for _ in range(3):
        assert fake.holding.acquire(timeout=30)
    engine.abort(["a"])
    reader.join()
    [cut] = found
    assert cut.lengths.tolist() == [4, 4, 4]
    assert {FINISH_REASONS[f] for f in cut.finish} == {"aborted"}
    fake.hold_after = None
    engine.load_state({"b": torch.ones(4)}, 5)
    [whole] = engine.generate([cut.resumed(9)])
    assert np.array_equal(whole.tokens[:, :4], cut.tokens)
    assert whole.lengths.tolist() == [9, 9, 9]
    assert whole.versions.tolist() == [0, 0, 0]
    assert whole.token_versions.tolist() == [[0] * 4 + [5] * 5] * 3
    sent = fake.asked[-1][1]
    assert sent["input_ids"] == [1, 2, *cut.tokens[0].tolist()]
    assert sent["sampling_params"]["max_new_tokens"] == 5
    [same] = engine.generate([whole.resumed(9)])
    assert np.array_equal(same.tokens, whole.tokens)


def test_new_weights_arrive_in_pieces_while_generation_is_paused(fake):
    engine = engine_of(fake, bucket_bytes=30)
    new = {name: torch.rand(tensor.shape).to(tensor.dtype) for name, tensor in weights().items()}
    engine.load_state(new, 3)
    assert all(torch.equal(fake.weights[name], new[name]) for name in new)
    assert fake.operations() == [
        "pause_generation",
        "begin_weight_update",
        *["update_weights_from_tensor"] * 2,
        "end_weight_update",
        "continue_generation",
        "update_weight_version",
    ]
    flushed = [b["flush_cache"] for name, b in fake.asked if name == "update_weights_from_tensor"]
    assert flushed == [False, True]
    assert engine.version == 3
    [group] = engine.generate(requests(1))
    assert group.versions.tolist() == [3, 3]
    assert engine.resident_bytes() == sum(tensor.nbytes for tensor in new.values())


def test_older_servers_take_weights_without_the_frame(fake):
    fake.missing = ("begin_weight_update", "end_weight_update")
    engine = engine_of(fake)
    engine.load_state({"b": torch.ones(4)}, 1)
    assert fake.weights["b"].sum() == 4


@pytest.mark.parametrize("operation", ["update_weights_from_tensor", "begin_weight_update"])
def test_weights_that_are_refused_are_an_error_and_generation_goes_on(fake, operation):
    engine = engine_of(fake)
    fake.refuse = (operation,)
    with pytest.raises(SglangRefused, match=f"no {operation} today") as caught:
        engine.load_state({"b": torch.ones(4)}, 1)
    assert caught.value.attributes["operation"] == operation
    assert engine.version == 0
    assert not fake.paused
    fake.refuse = ()
    engine.load_state({"b": torch.ones(4)}, 1)
    assert engine.version == 1


def test_a_refusal_is_read_in_either_form():
    for answer in ((True, "fine"), {"success": True, "message": ""}, None, {"status": "ok"}):
        check_done(answer, "it", "here")
    for answer in (
        (False, "why not"),
        [False, "why not"],
        {"success": False, "message": "why not"},
    ):
        with pytest.raises(SglangRefused, match="refused it: why not"):
            check_done(answer, "it", "here")


def test_weights_by_broadcast_and_by_handles(fake):
    engine = engine_of(fake)
    fake.broadcast = queue.Queue()
    engine.join(("10.0.0.1", 5000), 3, "weights", "nccl")
    assert fake.asked[-1][1] == {
        "master_address": "10.0.0.1",
        "master_port": 5000,
        "rank_offset": 1,
        "world_size": 3,
        "group_name": "weights",
        "backend": "nccl",
    }
    new = {"a": torch.rand(3, 2), "c": torch.rand(5).bfloat16()}
    engine.load_broadcast(new, 2, "weights", fake.broadcast.put)
    assert torch.equal(fake.weights["a"], new["a"])
    engine.load_ipc({"gpu-0": "ipc:///tmp/x"}, 3)
    assert engine.version == 3
    with pytest.raises(SglangRefused, match="from handles"):
        engine.load_ipc({}, 4)


def test_it_sleeps_and_wakes_once(fake):
    engine = engine_of(fake)
    engine.load_state({"b": torch.ones(4)}, 1)
    del fake.asked[:]
    for step in (engine.offload, engine.offload):
        step()
    assert engine.resident_bytes() == 0
    for step in (engine.onload, engine.onload):
        step()
    assert fake.operations() == [
        "flush_cache",
        "release_memory_occupation",
        "resume_memory_occupation",
    ]
    assert fake.asked[1][1] == {"tags": ["kv_cache", "weights"]}
    assert engine.resident_bytes() == 16


def test_a_server_that_fails_is_named_with_its_words(fake):
    engine = engine_of(fake)
    fake.broken = {"generate": (500, b"out of memory")}
    with pytest.raises(SglangRefused, match=f"{fake.url} answered 500: out of memory"):
        list(engine.generate(requests(2)))
    bad = {
        "meta_info": {"finish_reason": {"type": "abort", "message": "too long", "status_code": 400}}
    }

    fake.broken = {"generate": (200, json.dumps(bad).encode())}
    with pytest.raises(SglangRefused, match="too long"):
        list(engine.generate(requests(1)))
    fake.broken = {"generate": (200, b"{...")}
    with pytest.raises(SglangRefused, match="no JSON"):
        list(engine.generate(requests(1)))


def test_a_server_that_is_not_there_is_an_error_in_time():
    engine = SglangGenerate(HttpServer("http://127.0.0.1:9", timeout_s=5))
    with pytest.raises(SglangRefused, match="cannot be reached"):
        list(engine.generate(requests(1)))


def test_what_it_cannot_do_is_said_before_anything_is_asked(fake):
    request = GenerationRequest("r", np.array([1]), 1, 2, Sampling(logprobs="processed"))
    with pytest.raises(ConfigError, match="only the kind full"):
        list(engine_of(fake).generate([request]))
    assert not fake.asked
    with pytest.raises(ConfigError, match="model=PATH"):
        make(ModelSpec(vocab_size=9), GenerateConfig(name="sglang"))


class FakeEngine:
    """The methods of `sglang.Engine` that are used."""

    def __init__(self):
        self.asked, self.fake = [], FakeSglang(weights())
        self.tokenizer_manager = self

    def generate(self, input_ids, sampling_params, rid, return_logprob):
        rows = zip(input_ids, sampling_params, rid, strict=True)
        return [
            self.fake.answer(
                "generate",
                {"input_ids": i, "sampling_params": s, "rid": r, "return_logprob": return_logprob},
            )[1]
            for i, s, r in rows
        ]

    def update_weights_from_tensor(self, named_tensors, flush_cache):
        for name, tensor in named_tensors:
            if name not in self.fake.weights:
                return False, f"there is no {name}"
            self.fake.weights[name].copy_(tensor)
        return True, "Success"

    def abort_request(self, rid, abort_all):
        self.asked.append(("abort", rid, abort_all))

    def release_memory_occupation(self, tags):
        self.asked.append(("release", tags))


def test_an_engine_in_this_process_does_the_same(fake):
    inner = FakeEngine()
    engine = SglangGenerate(EngineServer(inner))
    ours, theirs = (
        by_uid(engine.generate(requests(3))),
        by_uid(engine_of(fake).generate(requests(3))),
    )
    for uid, group in ours.items():
        assert np.array_equal(group.tokens, theirs[uid].tokens)
        assert np.array_equal(group.finish, theirs[uid].finish)
    engine.load_state({"b": torch.ones(4)}, 1)
    assert inner.fake.weights["b"].sum() == 4
    with pytest.raises(SglangRefused, match="there is no z"):
        engine.load_state({"z": torch.ones(4)}, 2)
    engine.abort()
    engine.offload()
    assert inner.asked == [("abort", "", True), ("release", ["kv_cache", "weights"])]


def test_a_rollout_worker_serves_the_trainers_weights_by_sglang():
    tiny = ModelSpec("tiny", vocab_size=16, hidden_size=16, layers=1, heads=2)
    names = dict(build_model(tiny).named_parameters())
    fake = FakeSglang({name: torch.zeros(value.shape) for name, value in names.items()})
    with running(fake), Cluster(launcher="inline") as cluster:
        config = GenerateConfig(name="sglang", sglang=SglangConfig(url=fake.url, timeout_s=60))
        trainer = TrainerWorker.group(cluster, tiny, TrainerConfig(), name="trainer").launch()
        rollout = RolloutWorker.group(cluster, tiny, config, "trainer/0", name="rollout").launch()
        [version, *_] = trainer.publish().result(60)
        assert rollout.load_weights(version).result(60) != [""]
        assert all(torch.equal(fake.weights[name], value) for name, value in names.items())
        prompts, samples = cluster.channels(1, "prompts", "samples")
        prompts.put_many(requests(4))
        prompts.close()
        wait_all([rollout.generate(prompts, samples)], timeout=60)
        assert sorted(group.uid for group in samples) == ["r0", "r1", "r2", "r3"]


@pytest.mark.gpu
def test_the_real_engine_agrees_with_the_embedded_one(tmp_path):
    pytest.importorskip(
        "sglang", reason="sglang is not installed: it needs a GPU and its own torch"
    )
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU for sglang")
    model = build_model(ModelSpec(vocab_size=256, hidden_size=256, seed=1, dtype="bfloat16"))
    model.save_pretrained(tmp_path)
    engine = SglangGenerate(EngineServer.start(str(tmp_path), skip_tokenizer_init=True))
    asked = [
        GenerationRequest("g", np.array([5, 9, 17]), 2, 12, Sampling(temperature=0, stop_ids=(2,)))
    ]
    for seed in (1, 2):
        model = build_model(ModelSpec(vocab_size=256, hidden_size=256, seed=seed, dtype="bfloat16"))
        reference = TorchGenerate(model)
        engine.load_state(reference.state(), seed)
        engine.offload()
        engine.onload()
        [ours], [theirs] = engine.generate(asked), reference.generate(asked)
        assert np.array_equal(ours.tokens[:, :4], theirs.tokens[:, :4])
        assert np.allclose(ours.logprobs[:, :4], theirs.logprobs[:, :4], atol=0.05)
