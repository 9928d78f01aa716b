"""Where in an object something is, for messages: `$.a[3].fn`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlinf.comm.encoding.structure import MAX_DEPTH


def path_to(root: object, target: object) -> str:
    """The path of the first place where `target` itself is found; `$` is the root.

    Where it is in nothing the codec walks (but inside a pickled object, say) the answer is the
    root.
    """
    return _search(root, target, ("$", 0), set()) or "$"


def _search(value: object, target: object, place: tuple[str, int], seen: set[int]) -> str | None:
    path, depth = place
    if value is target or type(value) is target:
        return path
    if depth > MAX_DEPTH or id(value) in seen:
        return None
    seen.add(id(value))
    for step, child in _children(value):
        found = _search(child, target, (path + step, depth + 1), seen)
        if found is not None:
            return found
    return None


def _children(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield step_of(key), item
        for key in value:
            yield f"{{key {key!r:.40}}}", key
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, item in zip(value._fields, value, strict=True):
            yield f".{name}", item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield f"{{{item!r:.40}}}", item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield f".{field.name}", getattr(value, field.name)


def step_of(key: object) -> str:
    """One step into a dict."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.80}]"
