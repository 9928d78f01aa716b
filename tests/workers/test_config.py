import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from rlinf.workers.bounds import Bounds, Count, Positive, Share
from rlinf.workers.config import build, keys, load
from rlinf.workers.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-3
    warmup_steps: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    model: str = "tiny"
    steps: int = 10
    launcher: Literal["ray", "inline"] = "ray"
    folder: Path | None = None
    trainer: Inner = field(default_factory=Inner)
    channels: dict[str, Inner] = field(default_factory=dict)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: tiny\nsteps: 20\npresets:\n  tiny: {trainer: {lr: 0.5}}\n"
        "  big: {steps: 7, trainer: {lr: 3e-5}}\n"
    )
    return path


def test_overrides_win_over_preset_over_file_over_defaults(file: Path) -> None:
    plain = load(Outer, file, preset_key="model")
    assert (plain.steps, plain.trainer.lr, plain.trainer.warmup_steps) == (20, 0.5, 0)
    big = load(Outer, file, ["model=big", "trainer.warmup_steps=4"], preset_key="model")
    assert (big.steps, big.trainer.lr, big.trainer.warmup_steps) == (7, 3e-5, 4)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("trainer.lrr=1", "trainer.lr"),
        ("lr=1", "trainer.lr"),
        ("trainr.lr=1", "trainer.lr"),
        ("step=3", "steps"),
        ("laucher=inline", "launcher"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(
    file: Path, override: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {nearest}\\?"):
        load(Outer, file, [override], preset_key="model")


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trainer: {warmup: 3}\n")
    with pytest.raises(ConfigError, match=r"trainer\.warmup: did you mean trainer\.warmup_steps"):
        load(Outer, path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=many", "steps must be int"),
        ("steps=true", "steps must be int"),
        ("steps=2.5", "steps must be int"),
        ("trainer.lr=fast", "trainer.lr must be float"),
        ("launcher=slurm", "launcher=slurm is not one of ray, inline"),
        ("model=huge", "choose one of big, tiny"),
        ("steps", "written key=value"),
        ("trainer=3", "trainer must be a mapping, not 3: it has the keys trainer."),
    ],
)
def test_a_value_of_the_wrong_kind_names_its_key(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Outer, file, [override], preset_key="model")


def test_values_are_read_as_yaml_writes_them(file: Path) -> None:
    given = ["trainer.lr=5e-4", "trainer.names=[a, b]", "folder=/tmp/x", "channels.q.lr=2"]
    config = load(Outer, file, given, preset_key="model")
    assert config.trainer.lr == 5e-4
    assert config.trainer.names == ("a", "b")
    assert config.folder == Path("/tmp/x")
    assert config.channels["q"].lr == 2.0


def test_a_missing_or_broken_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load(Outer, tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load(Outer, broken)


def test_every_key_is_listed_with_its_kind() -> None:
    assert keys(Outer)["trainer.lr"] == "float"
    assert "trainer" not in keys(Outer)


def test_a_refused_value_of_the_dataclass_itself_is_a_configuration_error() -> None:
    @dataclass(frozen=True)
    class Positive:
        n: int = 1

        def __post_init__(self) -> None:
            if self.n < 1:
                raise ValueError("n must be at least 1")

    with pytest.raises(ConfigError, match="n must be at least 1"):
        build(Positive, {"n": 0})


@dataclass(frozen=True)
class Bounded:
    count: Count = 1
    rate: Positive = 0.5
    share: Share = 0.5
    tries: Annotated[int, Bounds(2)] = 2
    free: float = 0.0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("count=0", "count=0 makes no sense: it must be at least 1"),
        ("rate=0", "rate=0.0 makes no sense: it must be above 0"),
        ("rate=.inf", "rate=inf makes no sense"),
        ("share=1.5", "share=1.5 makes no sense: it must be from 0 to 1"),
        ("tries=1", "tries=1 makes no sense: it must be at least 2"),
        ("free=.nan", "free must be float, not nan"),
        ("count=1.5", "count must be int"),
    ],
)
def test_a_value_out_of_its_bounds_names_the_key(tmp_path: Path, given: str, why: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("count: 3\n")
    with pytest.raises(ConfigError, match=re.escape(why)):
        load(Bounded, path, [given])
    assert load(Bounded, path, ["share=1", "free=.inf"]).share == 1.0


def test_of_a_key_given_twice_the_last_value_counts(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("count: 3\n")
    assert load(Bounded, path, ["count=1", "count=2"]).count == 2


def test_a_choice_lies_below_the_file_and_its_presets(file: Path) -> None:
    choices = {
        "launcher": {
            "ray": {"trainer": {"lr": 9.0, "warmup_steps": 3}},
            "inline": {"trainer": {"warmup_steps": 5}, "steps": 1},
        }
    }
    ray = load(Outer, file, preset_key="model", choices=choices)
    assert (ray.trainer.lr, ray.trainer.warmup_steps, ray.steps) == (0.5, 3, 20)
    inline = load(Outer, file, ["launcher=inline"], choices=choices)
    assert (inline.trainer.lr, inline.trainer.warmup_steps, inline.steps) == (1e-3, 5, 20)
    own = load(Outer, file, ["launcher=inline", "trainer.warmup_steps=8"], choices=choices)
    assert own.trainer.warmup_steps == 8
    with pytest.raises(ConfigError, match="launcher=slurm is not known: choose one of inline, ray"):
        load(Outer, file, ["launcher=slurm"], choices=choices)


def test_a_file_of_the_users_lies_between_the_programs_and_the_overrides(
    file: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model: big\nsteps: 3\ntrainer: {warmup_steps: 9}\n")
    arguments = [f"config={own}", "trainer.warmup_steps=1"]
    config = load(Outer, file, arguments, preset_key="model")
    assert (config.model, config.steps, config.trainer.lr) == ("big", 3, 3e-5)
    assert config.trainer.warmup_steps == 1
    own.write_text("stps: 3\n")
    with pytest.raises(ConfigError, match="did you mean steps"):
        load(Outer, file, [f"config={own}"], preset_key="model")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load(Outer, file, ["config=nowhere.yaml"], preset_key="model")


@dataclass(frozen=True)
class Tuned:
    inner: Inner = field(default_factory=lambda: Inner(lr=7.0))


def test_what_is_not_said_of_a_part_is_as_its_owner_has_it() -> None:
    assert build(Tuned, {"inner": {"warmup_steps": 3}}).inner == Inner(lr=7.0, warmup_steps=3)
    assert build(Tuned, {"inner": {}}).inner == Inner(lr=7.0)
