"""What people read of a configuration is what the program was given."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from rlinf.workers.config import combine, layers, load, origins
from rlinf.workers.options import dump, options, table


@dataclass(frozen=True, slots=True)
class Inner:
    """A part.

    Attributes:
        lr: How fast it learns;
            not too fast.
        names: Of things.

    More text: not of an attribute.
    """

    lr: float = 1e-3
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outer:
    """The whole.

    Attributes:
        launcher: Where it runs.
        folder: Where it is written.
    """

    launcher: Literal["ray", "inline"] = "ray"
    folder: Path | None = None
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    model: str = "a: b"


def test_each_key_has_its_value_and_its_meaning() -> None:
    found = {option.key: option for option in options(Outer(maybe=Inner(names=("x", "y"))))}
    assert list(found) == [
        *("launcher", "folder", "model", "inner.lr", "inner.names", "maybe.lr", "maybe.names")
    ]
    assert found["launcher"].choices == ("ray", "inline")
    assert found["folder"].value == "null" and found["folder"].meaning == "Where it is written."
    assert found["inner.lr"].meaning == "How fast it learns; not too fast."
    assert found["maybe.names"].value == "[x, y]"
    assert found["model"].value == "'a: b'"


def test_the_table_keeps_its_width() -> None:
    lines = table(Outer(folder=Path("a" * 70)), width=80).splitlines()
    assert lines[0].split() == ["launcher=ray", "[ray|inline]", "Where", "it", "runs."]
    assert all(len(line) <= 80 for line in lines if "aaa" not in line)


def test_the_dump_can_be_loaded_and_tells_origins(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("inner: {lr: 0.5}\npresets:\n  small: {maybe: {names: [x]}}\n  '*': {}\n")
    settings = layers(Outer, file, ["model=small", "folder=here"], preset_key="model")
    config = combine(Outer, settings)
    text = dump(config, origins(settings))
    where = {line.split(":")[0].strip(): line.split("# ")[-1] for line in text.splitlines()}
    assert where["folder"] == where["model"] == "command line"
    assert where["names"] == "config.yaml, model=small" and where["launcher"] == "default"
    assert "lr: 0.5" in text and yaml.safe_load(text)["maybe"]["names"] == ["x"]
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(text)
    assert load(Outer, file, [f"config={dumped}"], preset_key="model") == config
