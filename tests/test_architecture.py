"""The rules of the house: floors, sizes, sorted exports, where the environment is read."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("packages", "apps", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "_pb2" not in path.name
)
PACKAGES = [path for path in SOURCES if "packages" in path.parts]
LEAVES = ("rlinf.comm", "rlinf.channel", "rlinf.sched", "rlinf.workers")

MAX_FILE_LINES = 400
MAX_MEDIAN_FILE_LINES = 150
MAX_FUNCTION_LINES = 60
SHORT_FUNCTION_LINES = 30
SHORT_FUNCTION_SHARE = 0.9
MAX_PARAMETERS = 6
MAX_PUBLIC_METHODS = 12

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield node


def lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def is_property(node: Function) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


def test_no_file_is_too_long() -> None:
    sizes = {name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_LINES} == {}
    assert sorted(sizes.values())[len(sizes) // 2] <= MAX_MEDIAN_FILE_LINES


def test_functions_are_short() -> None:
    sizes = {f"{name(p)}:{f.lineno} {f.name}": lines(f) for p in SOURCES for f in functions(p)}
    assert {where: size for where, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}
    short = sum(size < SHORT_FUNCTION_LINES for size in sizes.values())
    assert short / len(sizes) >= SHORT_FUNCTION_SHARE


def test_functions_have_few_parameters() -> None:
    def count(node: Function) -> int:
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return sum(argument.arg not in ("self", "cls") for argument in named)

    crowded = {
        f"{name(p)}:{f.lineno} {f.name}": count(f)
        for p in SOURCES
        for f in functions(p)
        if count(f) > MAX_PARAMETERS
    }
    assert crowded == {}


def test_classes_have_few_public_methods() -> None:
    crowded = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                public = [
                    f.name
                    for f in node.body
                    if isinstance(f, Function) and not f.name.startswith("_") and not is_property(f)
                ]
                if len(public) > MAX_PUBLIC_METHODS:
                    crowded[f"{name(path)}:{node.lineno} {node.name}"] = public
    assert crowded == {}


@pytest.mark.parametrize("path", PACKAGES, ids=name)
def test_environment_is_read_in_config_only(path: Path) -> None:
    if path.name == "config.py":
        return
    reads = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    assert reads == [], f"{name(path)} touches os.environ on lines {reads}"


def test_exports_are_sorted_and_exist() -> None:
    for path in PACKAGES:
        if path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                exported = ast.literal_eval(node.value)
                assert list(exported) == sorted(exported), name(path)


def test_the_namespace_has_no_init() -> None:
    assert list(ROOT.glob("packages/*/src/rlinf/__init__.py")) == []


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_package_has_the_four_common_files(leaf: str) -> None:
    short = leaf.removeprefix("rlinf.")
    folder = ROOT / f"packages/rlinf-{short}/src/rlinf/{short}"
    missing = [
        f for f in ("__init__", "config", "errors", "testing") if not (folder / f"{f}.py").exists()
    ]
    assert missing == []


@pytest.mark.parametrize("leaf", LEAVES)
def test_importing_does_nothing(leaf: str) -> None:
    program = f"""
import os, sys, threading
before = dict(os.environ)
import {leaf}
assert dict(os.environ) == before, "the environment was changed"
assert threading.active_count() == 1, "a thread was started"
heavy = {{"torch", "ray", "transformers"}} & set(sys.modules)
assert not heavy, f"imported {{heavy}}"
names = [n for n in {leaf}.__all__ if not hasattr({leaf}, n)]
assert not names, f"__all__ names what is not there: {{names}}"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
