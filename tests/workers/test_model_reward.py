import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rlinf.workers.engines.model_reward import ModelReward, SequenceClassifier
from rlinf.workers.roles import STATUSES, Group, Residency, RewardEngine, RewardModel, Sampling


def classifier(labels=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Qwen2ForSequenceClassification(
            Qwen2Config(
                vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=2, num_labels=labels, pad_token_id=0,
            )
        ).double()  # fmt: skip


def rows(count):
    rng = np.random.default_rng(0)
    return [
        tuple(rng.integers(1, 20, rng.integers(1, 9)).astype(np.int32) for _ in range(2))
        for _ in range(count)
    ]


def test_the_value_of_a_row_is_that_of_its_last_token():
    model = classifier()
    scorer = SequenceClassifier(model, batch_tokens=30)
    assert isinstance(scorer, RewardModel) and isinstance(scorer, Residency)
    given = [*rows(9), (np.array([3], np.int32), np.array([4, 0], np.int32))]  # ends with padding's
    expected = []
    for prompt, response in given:
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
            expected.append(model.score(hidden[:, -1]).item())
    assert scorer.score(given) == pytest.approx(expected, abs=1e-9)
    assert SequenceClassifier(model).score(given[::-1]) == pytest.approx(expected[::-1], abs=1e-9)
    assert len(set(np.round(expected, 6))) == len(expected)


class Fixed:
    def score(self, rows):
        return [float("nan") if len(response) == 2 else len(response) for _, response in rows]


def test_a_value_that_is_no_number_is_unscored():
    lengths = np.array([1, 2, 3], np.int32)
    group = Group(
        uid="0",
        prompt_ids=np.array([1], np.int32),
        tokens=np.ones((3, 3), np.int32),
        lengths=lengths,
        logprobs=np.zeros((3, 3), np.float32),
        finish=np.ones(3, np.uint8),
        versions=np.zeros(3, np.int32),
        sampling=Sampling(),
    )
    reward = ModelReward(Fixed())
    assert isinstance(reward, RewardEngine)
    (scored,) = reward.score([group])
    assert scored.rewards.tolist() == [1, 0, 3]
    assert [STATUSES[s] for s in scored.status] == ["scored", "unscored", "scored"]


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="one label"):
        SequenceClassifier(classifier(labels=2))
