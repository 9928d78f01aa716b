"""What the documentation says is so."""

import ast
import functools
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from rlinf.channel.errors import Timeout as ChannelTimeout
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.comm.errors import TravellingError
from rlinf.sched import Plan, TraceError
from rlinf.workers import StartError

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


LEAVES = ("channel", "comm", "sched", "workers")
BASES = Exception, TravellingError


def _errors() -> dict[str, type[BaseException]]:
    """Every error that a package has, without the base of each."""
    found = {}
    for leaf in LEAVES:
        module = importlib.import_module(f"rlinf.{leaf}.errors")
        kinds = [one for one in vars(module).values() if isinstance(one, type)]
        own = [one for one in kinds if one.__module__ == module.__name__]
        found |= {one.__name__: one for one in own if one.__base__ not in BASES}
    return found


def test_every_error_has_its_line_in_the_table() -> None:
    lines = re.findall(r'^\| <a id="(\w+)"></a>`(\w+)` \| (.+) \|$', PAGE.read_text(), re.M)
    assert {name for _, name, _ in lines} == _errors().keys()
    assert all(anchor == name.lower() for anchor, name, _ in lines)
    titles = re.findall(r"^## (.+)$", PAGE.read_text(), re.M)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    linked = {target for *_, text in lines for target in re.findall(r"\(#([\w-]+)\)", text)}
    assert linked <= anchors, linked - anchors


@pytest.mark.parametrize(
    "error",
    [
        CommTimeout("late"),
        ChannelTimeout("samples", "get", 1.0),
        StartError("it did not start", worker="w/0"),
        TraceError("nothing there"),
    ],
    ids=lambda error: type(error).__module__,
)
def test_an_error_says_where_to_look(error: BaseException) -> None:
    line = f"see docs/troubleshooting.md#{type(error).__name__.lower()}"
    assert "".join(traceback.format_exception(error)).splitlines()[-1] == line


PAGES = sorted((*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/*/README.md")))
PROGRAMS = [page for kind in ("tutorials", "howto") for page in (ROOT / "docs" / kind).glob("*.md")]


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem == "learn"))
        for page in PROGRAMS
        if _blocks(page, "python") and ".zh." not in page.name
    ],
)
def test_the_program_of_a_page_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("\n".join(_blocks(page, "python")))
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(_blocks(page, "text"))


@pytest.mark.parametrize("leaf", LEAVES)
def test_the_program_of_a_readme_is_the_example(leaf: str) -> None:
    """Which the tests of the package run."""
    program = _blocks(ROOT / f"packages/rlinf-{leaf}/README.md", "python")[0]
    assert program == (ROOT / f"examples/{leaf}.py").read_text()
    assert program.count("\n") < 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_are_well_formed(page: Path) -> None:
    for block in _blocks(page, "python"):
        ast.parse(block)
    for block in _blocks(page, "toml"):
        tomllib.loads(block)
    for block in _blocks(page, "bash"):
        checks = [["bash", "-n"], ["shellcheck", "-s", "bash", "-"]]
        for command in checks[: 2 if shutil.which("shellcheck") else 1]:
            done = subprocess.run(command, input=block, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


CLUSTER = ROOT / "docs/cluster.md"


def test_the_plan_for_a_cluster_is_made_as_the_page_says(tmp_path: Path) -> None:
    [program] = _blocks(CLUSTER, "python")
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(Plan.load(tmp_path / "plan.yaml").placements()) == {"rollout", "trainer"}


def test_the_kubernetes_file_has_the_keys_of_its_kind() -> None:
    """Those of KubeRay's API `ray.io/v1`: what it must have, and what it may have beside."""
    [text] = _blocks(CLUSTER, "yaml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = job["spec"]
    assert spec.keys() == {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"}
    program, *arguments = spec["entrypoint"].split()[1:]
    assert program.startswith("/rlinf/") and (ROOT / program.removeprefix("/rlinf/")).exists()
    assert all("=" in argument for argument in arguments)
    cluster = spec["rayClusterSpec"]
    assert cluster.keys() == {"headGroupSpec", "workerGroupSpecs"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() == {"groupName", "replicas", "rayStartParams", "template"}
    volumes = cluster["headGroupSpec"]["template"]["spec"]
    assert {volume["name"] for volume in volumes["volumes"]} == {
        mount["name"] for mount in volumes["containers"][0]["volumeMounts"]
    }


def test_the_tutorial_in_chinese_has_the_same_program() -> None:
    folder = ROOT / "docs/tutorials"
    for language in ("python", "text"):
        assert _blocks(folder / "flow.zh.md", language) == _blocks(folder / "flow.md", language)


def test_every_command_that_is_named_exists() -> None:
    scripts = set(tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["scripts"])
    for package in ROOT.glob("packages/*/pyproject.toml"):
        scripts |= set(tomllib.loads(package.read_text())["project"].get("scripts", {}))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"hatch run ([\w-]+)(?![\w:-])", page.read_text())
    }
    assert named <= scripts | {"python"}, named - scripts


def test_keys_in_the_table_of_configurations_exist() -> None:
    table = (ROOT / "docs/howto/configuration.md").read_text()
    mine = re.findall(r"^\| `([\w.]+)`", table, re.M)
    help_text = subprocess.run(
        [sys.executable, ROOT / "apps/rlhf/main.py", "--help"], capture_output=True, text=True
    ).stdout
    known = set(re.findall(r"^  ([\w.]+)=", help_text, re.M))
    assert len(mine) > 30 and set(mine) <= known, set(mine) - known


def _bare(body: Sequence[ast.stmt], where: str) -> Iterator[str]:
    """Public functions, classes and methods without a docstring."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        overload = any("overload" in ast.unparse(one) for one in node.decorator_list)
        if not overload and not ast.get_docstring(node):
            yield f"{where}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _bare(node.body, f"{where}{node.name}.")


def test_every_public_name_has_a_docstring() -> None:
    packages = (path for path in SOURCES if "/src/" in path.as_posix())
    written = (path for path in packages if not path.stem.endswith("_pb2"))
    bare = [
        name for path in written for name in _bare(ast.parse(path.read_text()).body, f"{path}: ")
    ]
    assert not bare
