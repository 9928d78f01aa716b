"""What the documentation says is so."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/troubleshooting.md"
SOURCES = sorted((*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/*.py")))
QUOTED = [
    " ".join(block.split())
    for block in re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)
]


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; what is formatted into it is `…`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def _templates() -> frozenset[str]:
    return frozenset(
        " ".join(text.split()) for path in SOURCES for text in _texts(ast.parse(path.read_text()))
    )


def test_many_messages_are_quoted() -> None:
    assert len(QUOTED) > 40


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert any(message in template for template in _templates()), f"nothing says: {message}"
