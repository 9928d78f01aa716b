"""What the keys of a configuration are set to, by what, and what they mean: for people to read."""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Option", "dump", "options", "table"]

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Option:
    """One key of a configuration."""

    key: str
    """With dots: `trainer.optimiser.lr`."""
    value: str
    """As it is written in YAML."""
    choices: tuple[str, ...]
    """All values that the key takes, where they can be listed."""
    meaning: str
    """What the docstring of its dataclass says of it."""


def options(config: object) -> list[Option]:
    """Every key of a configuration (a dataclass instance): its own before those it inherits, and
    before both parts that have keys of their own.
    """
    return list(_options(config, ""))


def table(config: object, width: int = 100) -> str:
    """`key=value` of every key, each with its meaning beside it, in lines of at most `width`."""
    found = options(config)
    heads = [f"{option.key}={option.value}" for option in found]
    column = min(max(map(len, heads), default=0) + 2, width // 2)
    lines = []
    for head, option in zip(heads, found, strict=True):
        text = option.meaning
        if option.choices:
            text = f"[{'|'.join(option.choices)}] {text}"
        told = textwrap.wrap(text, max(width - column - 2, 20)) or [""]
        if len(head) > column - 2:
            lines.append(f"  {head}")
        else:
            told[0] = f"{head:<{column}}{told[0]}"
            lines.append(f"  {told.pop(0)}")
        lines += [f"  {'':<{column}}{line}" for line in told]
    return "\n".join(line.rstrip() for line in lines)


def dump(config: object, origins: Mapping[str, str]) -> str:
    """The configuration as YAML; beside each key stands where its value is from.

    Args:
        origins: Key -> origin; that of a key which is not there is `default`, or that of the
            nearest key it lies below.
    """
    lines: list[tuple[str, str]] = []
    above: list[str] = []
    for option in options(config):
        *parents, leaf = option.key.split(".")
        same = 0
        while same < min(len(parents), len(above)) and parents[same] == above[same]:
            same += 1
        lines += [("  " * depth + f"{parents[depth]}:", "") for depth in range(same, len(parents))]
        above = parents
        lines.append(
            ("  " * len(parents) + f"{leaf}: {option.value}", _origin(option.key, origins))
        )
    width = max((len(text) for text, origin in lines if origin), default=0)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines)


def _origin(key: str, origins: Mapping[str, str]) -> str:
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return DEFAULT


def _options(config: object, where: str) -> Iterator[Option]:
    hints = typing.get_type_hints(type(config), include_extras=True)
    meanings = _meanings(type(config))
    for field in _ordered(config):
        key, value = f"{where}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _options(value, f"{key}.")
        else:
            yield Option(
                key, _yaml(value), _choices(hints[field.name]), meanings.get(field.name, "")
            )


def _ordered(config: Any) -> list[dataclasses.Field[Any]]:
    """Plain keys first; among them, and among the others, the class's own first."""
    own = vars(type(config)).get("__annotations__", {})
    return sorted(
        (field for field in dataclasses.fields(config) if field.init),
        key=lambda f: (dataclasses.is_dataclass(getattr(config, f.name)), f.name not in own),
    )


def _meanings(cls: type) -> dict[str, str]:
    """Attribute -> text, from `Attributes:` of the docstrings, or from the string below each."""
    found: dict[str, str] = {}
    for kind in reversed(cls.__mro__[:-1]):
        _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
        section = re.split(r"\n(?=\S)", section, maxsplit=1)[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n(?:     .*)?)*)", section, re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in entries or _below(kind)}
    return found


def _below(cls: type) -> Iterator[tuple[str, str]]:
    """Attributes of a class with the string that stands below each in the source."""
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):
        return
    for node, text in itertools.pairwise(getattr(tree, "body", [])):
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield ast.unparse(node.target), str(ast.literal_eval(text.value))


def _choices(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(str, typing.get_args(hint)))
    return ()


def _yaml(value: Any) -> str:
    plain = _plain(value)
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value
