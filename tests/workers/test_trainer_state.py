"""What a trainer saves decides all that comes: files, shards, random state, place in the data."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.parameters import WeightsMismatch
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.errors import CheckpointTorn
from rlinf.workers.position import Position
from rlinf.workers.random_state import load_random_state, random_state
from rlinf.workers.roles import GenerationRequest, Sampling, Score, ScoredGroup
from rlinf.workers.shards import Shard, load_tensors, save_tensors, whole

torch.set_num_threads(1)  # several threads on busy cores wait for each other most of the time

CONFIG = TrainerConfig(OptimiserConfig(lr=1e-2, warmup_steps=5, weight_decay=0.01))


def trainer(seed: int = 0, config: TrainerConfig = CONFIG) -> TorchTrainer:
    return TorchTrainer(build_model(ModelSpec(vocab_size=21, hidden_size=32, seed=seed)), config)


def step(engine: TorchTrainer, number: int) -> float:
    """One step on samples of its own; those of step 3 have nothing to learn from."""
    prompt = np.array([3 + number, 4, 5], np.int32)
    asked = GenerationRequest(f"{number}", prompt, 6, 5, Sampling(seed=number))
    [group] = TorchGenerate(engine.model).generate([asked])
    rewards = [Score(0.0 if number == 3 else float(t % 3)) for t in group.tokens[:, 0]]
    engine.accumulate([ScoredGroup.of(group, rewards)])
    return engine.finish_step().metrics()["loss"]


@pytest.mark.parametrize("config", [CONFIG, TrainerConfig(trainable_layers=1)])
def test_steps_after_a_restore_are_those_of_the_uninterrupted_trainer(
    tmp_path: Path, config: TrainerConfig
) -> None:
    """Inside the warm-up, over a step that moves nothing, to the last bit."""
    one = trainer(config=config)
    for number in range(1, 4):
        step(one, number)
    tensors, numbers = one.save()
    assert numbers["optimiser_calls"] == 3 and numbers["version"] == one.version < 3
    save_tensors(tmp_path / "t-0.safetensors", whole(tensors))
    saved = json.dumps(numbers)
    expected = [step(one, number) for number in range(4, 8)]

    other = trainer(seed=7, config=config)
    other.sft_step([(np.array([3], np.int32), np.array([4], np.int32))], OptimiserConfig())
    step(other, 1)
    other.restore(load_tensors(tmp_path.glob("t-*")), json.loads(saved))
    assert [step(other, number) for number in range(4, 8)] == expected
    assert any(expected)
    for name, value in one.state().items():
        assert torch.equal(value, other.state()[name]), name


def test_restoring_forgets_a_step_that_was_begun() -> None:
    one, other = trainer(), trainer()
    saved = {name: tensor.clone() for name, tensor in one.save()[0].items()}
    numbers = one.save()[1]
    other.accumulate([])
    step_two = TorchGenerate(other.model).generate(
        [GenerationRequest("x", np.array([3], np.int32), 4, 5)]
    )
    other.accumulate([ScoredGroup.of(next(iter(step_two)), [Score(float(i)) for i in range(4)])])
    with pytest.raises(ValueError, match="finish the policy step"):
        other.save()
    other.restore(saved, numbers)
    assert step(other, 1) == step(one, 1)


def test_a_checkpoint_of_another_model_changes_nothing() -> None:
    one = trainer()
    before = {name: tensor.clone() for name, tensor in one.state().items()}
    tensors, numbers = one.save()
    incomplete = dict(list(tensors.items())[1:])
    with pytest.raises(WeightsMismatch, match="no values for the parameter"):
        one.restore(incomplete, numbers)
    assert all(torch.equal(before[name], value) for name, value in one.state().items())


def cut(tensor: torch.Tensor, ranks: int, axis: int) -> list[Shard]:
    """As many slices along an axis; some may be empty."""
    parts, shards, start = torch.tensor_split(tensor, ranks, axis), [], 0
    for part in parts:
        box = [0] * tensor.dim()
        box[axis] = start
        shards.append(Shard(part, tuple(tensor.shape), tuple(box)))
        start += part.shape[axis]
    return shards


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shards_of_any_number_of_ranks_make_the_whole(tmp_path: Path, ranks: int) -> None:
    tensors = {
        "rows": torch.arange(12.0).reshape(4, 3),
        "columns": torch.arange(20, dtype=torch.bfloat16).reshape(2, 10),
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
    }
    rows, columns = cut(tensors["rows"], ranks, 0), cut(tensors["columns"], ranks, 1)
    for rank in range(ranks):
        shards = {"rows": rows[rank], "columns": columns[rank]}
        if rank == ranks - 1:
            shards |= whole({name: tensors[name] for name in ("scalar", "empty")})
        save_tensors(tmp_path / f"t-{rank}.safetensors", shards)
    loaded = load_tensors(tmp_path.iterdir())
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name


def test_shards_that_are_missing_or_twice_are_refused(tmp_path: Path) -> None:
    for rank, shard in enumerate(cut(torch.arange(8.0), 2, 0)):
        save_tensors(tmp_path / f"t-{rank}.safetensors", {"x": shard})
    first = tmp_path / "t-0.safetensors"
    with pytest.raises(CheckpointTorn, match="x: 4 of its 8 elements are missing"):
        load_tensors([first])
    with pytest.raises(CheckpointTorn, match="are there twice"):
        load_tensors([*tmp_path.iterdir(), first])
    first.write_bytes(first.read_bytes()[:-9])
    with pytest.raises(CheckpointTorn, match=r"t-0.safetensors cannot be read"):
        load_tensors(tmp_path.iterdir())
    save_file({"x": torch.zeros(1)}, first)
    with pytest.raises(CheckpointTorn):
        load_tensors([first])


def test_every_random_generator_goes_on() -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))]

    before = random_state()
    try:
        draw()
        state = json.loads(json.dumps(random_state()))
        expected = [draw() for _ in range(3)]
        load_random_state(state)
        assert [draw() for _ in range(3)] == expected
    finally:
        load_random_state(before)


def test_what_was_on_its_way_is_drawn_again_first() -> None:
    position = Position()
    assert position.draw(4) == [0, 1, 2, 3]
    position.trained([1, 2])
    with pytest.raises(ValueError, match="item 1 is not on its way"):
        position.trained([1])
    state = json.loads(json.dumps(position.state()))
    resumed = Position()
    resumed.load(state)
    assert resumed.draw(1) == [0]
    assert resumed.state() == {"next": 4, "in_flight": [0, 3]}, "drawn or not, they are owed"
    assert resumed.draw(3) == [3, 4, 5]
    resumed.load(None)
    assert resumed.draw(2) == [0, 1]


def test_a_resumed_run_does_not_begin_with_a_burst() -> None:
    """One owner says what may be on its way, whatever the version and the number of ranks."""
    position = Position()
    assert position.room(batch=2, max_staleness=0) == 2, "never 0: nothing would ever begin"
    for _ in range(100):
        position.trained(position.draw(position.room(4, 2))[:4])
    position.trained(position.in_flight[:4])
    assert position.room(4, 2) == 8 and len(position.in_flight) == 4
    resumed = Position()
    resumed.load(position.state())
    assert resumed.room(4, 2) == 12
    assert resumed.draw(12)[:4] == list(position.in_flight)
    assert resumed.room(4, 2) == 0


def test_in_order_no_item_is_staler_than_the_bound() -> None:
    for batch in (1, 3):
        for bound in (0, 1, 2):
            position, born = Position(), {}
            for version in range(20):
                born |= dict.fromkeys(position.draw(position.room(batch, bound)), version)
                step = position.in_flight[:batch]
                position.trained(step)
                assert max(version - born[number] for number in step) == min(version, bound)


@pytest.mark.parametrize("seed", range(200))
def test_cut_off_anywhere_each_item_is_trained_on_once(seed: int) -> None:
    """Sampling ahead of training, long items last, killed at any moment, several times over."""
    dice = random.Random(seed)
    learnt: Counter[int] = Counter()
    saved: tuple[Counter[int], object] = (Counter(), None)
    for _ in range(dice.randrange(2, 6)):
        position, learnt = Position(), Counter(saved[0])
        position.load(saved[1])  # type: ignore[arg-type]
        away: list[int] = []
        for _ in range(dice.randrange(1, 30)):
            away += position.draw(dice.randrange(0, 5))
            done = sorted(away, key=lambda n: (n % 7, dice.random()))[: dice.randrange(0, 4)]
            away = [number for number in away if number not in done]
            position.trained(done)
            learnt.update(done)
            if dice.random() < 0.3:
                saved = (Counter(learnt), json.loads(json.dumps(position.state())))
    final = Position()
    final.load(saved[1])  # type: ignore[arg-type]
    learnt, drawn = Counter(saved[0]), final.draw(200)
    learnt.update(drawn)
    assert set(learnt.values()) == {1}
    assert sorted(learnt) == list(range(max(drawn) + 1)), "none was lost, the slow ones neither"
