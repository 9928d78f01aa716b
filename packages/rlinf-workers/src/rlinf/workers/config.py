"""Configuration: frozen dataclasses filled from one YAML file and `key=value` overrides.

A program declares its keys as (nested) frozen dataclasses. `load` reads them in layers, each
winning over the one before: the dataclass defaults, the program's YAML file, a file of the user's
(`config=FILE`), the overrides. The program's file may hold `presets`: a mapping from a value of one
top-level key to the settings which that value implies, so that `model=smollm2` can bring its own
learning rate; the preset `*` is for all others. A program may have such choices too
(`algorithm=dapo`); theirs are laid below the file.

Nothing is guessed: an unknown key, a value of the wrong type or out of its bounds or a missing file
is a `ConfigError` that names the key, and for an unknown key the nearest one that exists. Of a key
that is given twice the last value counts.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from rlinf.workers.bounds import Bounds
from rlinf.workers.errors import ConfigError

__all__ = [
    "Choices",
    "Layer",
    "build",
    "combine",
    "keys",
    "layers",
    "load",
    "origins",
    "worker_environment",
]

T = TypeVar("T")
Tree = dict[str, Any]
Choices = Mapping[str, Mapping[str, Tree]]
"""A top-level key -> a value of it -> the settings which that value implies."""
FURTHER = "config"
"""The override that names a file instead of setting a key."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings, and where they are from; of two layers the later one wins."""

    origin: str
    tree: Tree


def load(
    cls: type[T],
    path: Path,
    overrides: Sequence[str] = (),
    preset_key: str = "",
    choices: Choices = MappingProxyType({}),
) -> T:
    """The settings of `layers` as an instance of `cls`; raises `ConfigError`."""
    return combine(cls, layers(cls, path, overrides, preset_key, choices))


def combine(cls: type[T], settings: Sequence[Layer]) -> T:
    """An instance of `cls` from its defaults and these layers; raises `ConfigError`."""
    tree: Tree = {}
    for layer in settings:
        tree = _merge(tree, layer.tree)
    return build(cls, tree)


def origins(settings: Sequence[Layer]) -> dict[str, str]:
    """Each key that is set, dotted, with the origin of the layer whose value counts."""
    return {key: layer.origin for layer in settings for key in _flat(layer.tree)}


def layers(
    cls: type,
    path: Path,
    overrides: Sequence[str] = (),
    preset_key: str = "",
    choices: Choices = MappingProxyType({}),
) -> list[Layer]:
    """Read `path` and `overrides` ("a.b=value", the value in YAML).

    `config=FILE` among the overrides is a file of further settings, laid below the others. Where
    `preset_key` names a key, the file's `presets[value of that key]` is laid over the file; where
    it is one of a section, as in `env.name`, the section alone (`env=...`) means it as well. For
    each key of `choices`, what its value implies lies below the file. Raises `ConfigError`.
    """
    file = _read(path)
    presets = file.pop("presets", {})
    section = preset_key.rpartition(".")[0]
    given = _parse([_in_full(text, section, preset_key) for text in overrides])
    further = given.pop(FURTHER, None)
    extra = {} if further is None else _read(Path(str(further)))
    _refuse_unknown(given, cls)
    chosen = _merge(_merge(file, extra), given)
    found = []
    for key, settings in choices.items():
        value = str(chosen.get(key, _default(cls, key)))
        found.append(Layer(f"{key}={value}", _chosen(settings, key, value)))
    found.append(Layer(path.name, file))
    if preset_key:
        choice = _lookup(chosen, preset_key)
        preset = "*" if choice not in presets and "*" in presets else choice
        origin = f"{path.name}, {preset_key}={choice}"
        found.append(Layer(origin, _chosen(presets, preset_key, preset)))
    return [*found, Layer(str(further), extra), Layer("command line", given)]


def build(cls: type[T], tree: Mapping[str, Any], where: str = "", base: T | None = None) -> T:
    """Make an instance of the dataclass `cls` from a nested mapping, checking names and types.

    What the mapping does not say is as in `base`, or the default.
    """
    if not isinstance(tree, Mapping):
        names = [f"{where}.{field.name}".lstrip(".") for field in dataclasses.fields(cls)]
        raise ConfigError(
            f"{where or 'the configuration'} must be a mapping, not {tree!r}: "
            f"it has the keys {', '.join(names)}"
        )
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    values = {} if base is None else {name: getattr(base, name) for name in fields}
    for name, value in tree.items():
        path = f"{where}.{name}" if where else str(name)
        if name not in fields:
            raise _unknown(path, keys(cls, where))
        if dataclasses.is_dataclass(hints[name]):
            own = values.get(name) or _unsaid(fields[name])
            values[name] = build(typing.cast(type, hints[name]), value, path, own)
        else:
            values[name] = _convert(hints[name], value, path)
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where or 'the configuration'}: {error}") from error


def _unsaid(field: "dataclasses.Field[Any]") -> Any:
    """What a field is where nothing is said; None where that is an error."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def keys(cls: type, where: str = "") -> dict[str, str]:
    """Every key of the dataclass `cls`, dotted, with the name of its type."""
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        path = f"{where}.{name}" if where else name
        if dataclasses.is_dataclass(hint):
            found.update(keys(typing.cast(type, hint), path))
        else:
            found[path] = getattr(hint, "__name__", str(hint))
    return found


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker process that may use `threads` cores."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    kept = {name: os.environ[name] for name in ("LOG_LEVEL",) if name in os.environ}
    return kept | {name: str(max(1, threads)) for name in names}


def _chosen(settings: Mapping[str, Tree], key: str, value: Any) -> Tree:
    if value not in settings:
        raise ConfigError(
            f"{key}={value} is not known: choose one of {', '.join(sorted(settings))}"
        )
    return settings[value]


def _refuse_unknown(given: Tree, cls: type) -> None:
    known = keys(cls)
    for key in _flat(given):
        inside = any(f"{key}.".startswith(f"{k}.") or k.startswith(f"{key}.") for k in known)
        if not inside:
            raise _unknown(key, known)


def _in_full(override: str, section: str, key: str) -> str:
    name, _, value = override.partition("=")
    return f"{key}={value}" if section and name == section else override


def _lookup(tree: Tree, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _default(cls: type, key: str) -> object:
    return next(f.default for f in dataclasses.fields(cls) if f.name == key)


def _read(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys")
    return tree


def _parse(overrides: Sequence[str]) -> Tree:
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"cannot read {text!r}: an override is written key=value")
        try:
            parsed = yaml.safe_load(value) if value else ""
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: {value!r} is not valid YAML") from error
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{key}: {parent} was already given the value {child!r}")
            node = child
        node[leaf] = parsed
    return tree


def _flat(tree: Tree, where: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        path = f"{where}.{name}" if where else name
        found += _flat(value, path) if isinstance(value, dict) and value else [path]
    return found


def _merge(low: Tree, high: Mapping[str, Any]) -> Tree:
    merged = dict(low)
    for name, value in high.items():
        below = merged.get(name)
        both = isinstance(below, dict) and isinstance(value, Mapping)
        merged[name] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _unknown(key: str, known: typing.Iterable[str]) -> ConfigError:
    """The nearest name is sought among whole paths and, for a bare name, among last parts."""
    leaf = key.rpartition(".")[2]
    nearest = max(known, key=lambda k: _ratio(key, k) + _ratio(leaf, k.rpartition(".")[2]))
    return ConfigError(f"unknown key {key}: did you mean {nearest}?")


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _convert(hint: Any, value: object, path: str) -> Any:
    """`value` as the type `hint` says; the exact inverse of what YAML can write."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        hint, bounds, *_ = typing.get_args(hint)
        return _within(bounds, _convert(hint, value, path), path)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        *others, last = (a for a in typing.get_args(hint) if a is not type(None))
        for other in others:
            with contextlib.suppress(ConfigError):
                return _convert(other, value, path)
        return _convert(last, value, path)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), typing.cast(Mapping[str, Any], value), path)
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(typing.get_args(hint)[0], item, path) for item in items)
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a mapping, not {value!r}")
        return {k: _convert(typing.get_args(hint)[1], v, f"{path}.{k}") for k, v in value.items()}
    if origin is typing.Literal:
        return _one_of(typing.get_args(hint), value, path)
    return _scalar(hint, value, path)


def _within(bounds: Bounds, value: Any, path: str) -> Any:
    if value not in bounds:
        raise ConfigError(f"{path}={value} makes no sense: it must be {bounds}")
    return value


def _one_of(choices: tuple[object, ...], value: object, path: str) -> object:
    if value not in choices:
        raise ConfigError(f"{path}={value} is not one of {', '.join(map(str, choices))}")
    return value


def _scalar(hint: type, value: object, path: str) -> object:
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            number = float(value)  # YAML reads 5e-4, without a dot, as a string
            if not math.isnan(number):
                return number
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    elif type(value) is hint or hint in (object, typing.Any):
        return value
    raise ConfigError(f"{path} must be {hint.__name__}, not {value!r}")
