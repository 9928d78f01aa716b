"""Every test that the guarantees name exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/guarantees.md").read_text())


def test_many_are_named() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)), ids=lambda part: part)
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not name or name in names, f"{path} has no {name}"


def test_every_promise_names_a_test() -> None:
    rows = re.findall(r"^\| \*\*.*$", (ROOT / "docs/guarantees.md").read_text(), re.M)
    assert rows and all("`tests/" in row for row in rows)
