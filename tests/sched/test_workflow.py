"""The YAML document: complaints with a path, and round trips."""

import json
import sys
from pathlib import Path

import pytest

from rlinf.sched import ProfileError, Workflow
from rlinf.sched.workflow import SCHEMA

GOOD = {
    "batch": 64,
    "devices": {"gpu": 8},
    "node_devices": 4,
    "components": {
        "rollout": {
            "sizes": [2, 4, 8],
            "times": [{"devices": 8, "batch": 64, "seconds": 10.0}, [4, 64, 19]],
            "emission": [0.2, 1.0],
            "resident_bytes": "2e9",
        },
        "train": {"times": [[8, 64, 5.0]], "node_local": True},
    },
    "memory_bytes": 8.0e10,
}


def changed(path: str, value: object) -> dict[str, object]:
    data = json.loads(json.dumps(GOOD))
    here = data
    *steps, last = path.split(".")
    for step in steps:
        here = here[int(step)] if isinstance(here, list) else here[step]
    here[int(last) if isinstance(here, list) else last] = value
    return data


def test_a_workflow_survives_its_file(tmp_path: Path):
    workflow = Workflow.from_dict(GOOD)
    assert workflow.devices == tuple(f"gpu:{i}" for i in range(8))
    assert workflow.graph.edges == (("rollout", "train"),)
    assert workflow.profile["rollout"].resident_bytes == 2e9
    for name in ("workflow.yaml", "workflow.json"):
        workflow.save(tmp_path / name)
        assert Workflow.load(tmp_path / name) == workflow
    assert len(workflow.on(3).devices) == 3


@pytest.mark.parametrize(
    ("path", "value", "where", "reason"),
    [
        ("batch", 0, "batch", "at least 1"),
        ("bacth", 3, "bacth", "did you mean 'batch'"),
        ("components.train.times", [], "components.train.times", "at least one sample"),
        ("components.train", {}, "components.train", "missing key 'times'"),
        ("components.rollout.times.0.seconds", -1, "components.rollout.times[0].seconds", "least"),
        ("components.rollout.times.1", [1, 2], "components.rollout.times[1]", "found 2"),
        ("components.rollout.times.0.device", 1, "components.rollout.times[0].device", "devices"),
        ("components.rollout.emission", [1.0, 0.5], "components.rollout.emission", "increase"),
        ("components.rollout.sizes", [0], "components.rollout.sizes[0]", "at least 1"),
        ("edges", [["rollout", "nobody"]], "edges", "no component 'nobody'"),
        ("edges", [["rollout"]], "edges[0]", "producer, consumer"),
        ("batch", None, "batch", "must be given"),
        pytest.param("batch", 10**400, "batch", "more than 300 digits", id="huge"),
        ("components.train.times", None, "components.train.times", "must be given"),
        ("components.a+b", {"times": [[1, 1, 1]]}, "components.a+b", "no such cycle"),
        ("memory_bytes", "much", "memory_bytes", "expected a number"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: object, where: str, reason: str):
    with pytest.raises(ProfileError) as caught:
        Workflow.from_dict(changed(path, value))
    assert caught.value.path == where
    assert reason in caught.value.reason


def test_a_broken_file_is_named(tmp_path: Path):
    file = tmp_path / "broken.yaml"
    file.write_text("a: [")
    with pytest.raises(ProfileError, match="neither YAML nor JSON"):
        Workflow.load(file)
    with pytest.raises(ProfileError, match="No such file"):
        Workflow.load(tmp_path / "absent.yaml")


def test_without_pyyaml_json_is_read_and_yaml_names_the_cure(tmp_path: Path, monkeypatch):
    Workflow.from_dict(GOOD).save(tmp_path / "real.yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    workflow = Workflow.from_dict(GOOD)
    workflow.save(tmp_path / "plain.yaml")
    assert Workflow.load(tmp_path / "plain.yaml") == workflow
    with pytest.raises(ProfileError, match=r"rlinf-sched\[yaml\]"):
        Workflow.load(tmp_path / "real.yaml")


def test_the_schema_knows_every_key():
    schema = json.loads(SCHEMA.read_text())
    from rlinf.sched.workflow import ENTRY, TOP

    assert set(schema["properties"]) == {"batch", "components", *TOP}
    entry = schema["properties"]["components"]["additionalProperties"]
    assert set(entry["properties"]) == {"times", *ENTRY}
