"""Reading YAML and JSON so that every complaint names the place and the reason."""

import difflib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rlinf.sched.errors import DocumentError

PlainData = Mapping[str, object]

WITHOUT_YAML = "YAML needs PyYAML: pip install 'rlinf-sched[yaml]'"


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a document, with its path and the error to raise about it."""

    value: object
    path: str = "document"
    error: type[DocumentError] = DocumentError
    source: str = ""

    def fail(self, reason: str) -> NoReturn:
        """Raise this document's error for this place."""
        raise self.error(self.path, reason, self.source)

    def child(self, value: object, key: str | int) -> "Node":
        """The value found under ``key`` or at index ``key``."""
        step = f"[{key}]" if isinstance(key, int) else (f".{key}" if self.path else key)
        return Node(value, self.path + step, self.error, self.source)

    def entries(self) -> dict[str, "Node"]:
        """The entries of a mapping with free keys."""
        if not isinstance(self.value, Mapping):
            self.fail(f"expected a mapping, found {_kind(self.value)}")
        return {str(key): self.child(value, str(key)) for key, value in self.value.items()}

    def fields(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, "Node"]:
        """The entries of a mapping with fixed keys; unknown and missing ones are errors."""
        found = self.entries()
        known = [*required, *optional]
        for key, node in found.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                node.fail(f"unknown key; {hint}")
        for key in required:
            if key not in found:
                self.fail(f"missing key {key!r}")
            if found[key].value is None:
                found[key].fail("is empty, and must be given")
        return {key: node for key, node in found.items() if node.value is not None}

    def items(self) -> list["Node"]:
        """The elements of a list."""
        if isinstance(self.value, str) or not isinstance(self.value, Sequence):
            self.fail(f"expected a list, found {_kind(self.value)}")
        return [self.child(value, index) for index, value in enumerate(self.value)]

    def text(self) -> str:
        """A non-empty string."""
        if not isinstance(self.value, str) or not self.value:
            self.fail(f"expected a text, found {_kind(self.value)}")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.fail(f"expected true or false, found {_kind(self.value)}")
        return self.value

    def number(self, minimum: float = 0.0) -> float:
        """A finite number, at least ``minimum``."""
        value = self.value
        if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a text.
            try:
                value = float(value)
            except ValueError:
                self.fail(f"expected a number, found {self.value!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"expected a number, found {_kind(value)}")
        try:
            value = float(value)
        except OverflowError:
            self.fail("expected a finite number, found one of more than 300 digits")
        if not math.isfinite(value):
            self.fail(f"expected a finite number, found {value}")
        if value < minimum:
            self.fail(f"must be at least {minimum:g}, is {value:g}")
        return value

    def integer(self, minimum: int = 0, maximum: int = 1 << 53) -> int:
        """A whole number from ``minimum`` to ``maximum``."""
        value = self.number(minimum)
        if value != int(value):
            self.fail(f"expected a whole number, found {value:g}")
        if value > maximum:
            self.fail(f"must be at most {maximum:,}, is {value:g}")
        return int(value)


def load(path: str | Path, error: type[DocumentError]) -> Node:
    """Read a YAML or JSON file; YAML needs PyYAML.

    Raises:
        DocumentError: of the given class, where the file is missing or cannot be parsed.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Node(_parsed(text), "", error, source)
    except OSError as problem:
        raise error("", f"cannot be read: {problem.strerror or problem}", source) from problem
    except ImportError as problem:
        raise error("", f"is not JSON, and {WITHOUT_YAML}", source) from problem
    except ValueError as problem:
        reason = " ".join(str(problem).split())
        raise error("", f"is neither YAML nor JSON: {reason}", source) from problem


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        import yaml
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(str(problem)) from problem


def save(data: PlainData, path: str | Path) -> None:
    """Write plain data as YAML, replacing the file at once.

    As JSON, which every reader of YAML understands, where the name ends so or PyYAML is absent.

    Raises:
        DocumentError: the path is a folder.
        OSError: it cannot be written.
    """
    target = Path(path)
    text = json.dumps(data, indent=2) + "\n"
    if target.suffix != ".json" and importlib.util.find_spec("yaml") is not None:
        import yaml

        text = yaml.safe_dump(dict(data), sort_keys=False, default_flow_style=None, width=100)
    if target.is_dir():
        raise DocumentError("", "is a folder, cannot be written", str(path))
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return repr(value)
