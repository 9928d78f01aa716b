import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import rlinf.comm
from rlinf.comm import CommConfig, ConfigError


def test_the_environment_is_read_by_field_name():
    config = CommConfig.from_environment(
        {
            "RLINF_COMM_HEARTBEAT_S": "1.5",
            "RLINF_COMM_ALLOW_PICKLE": "false",
            "RLINF_COMM_BACKEND_PRIORITY": "tcp, shm",
            "RLINF_COMM_POOL_BYTES": "1000",
            "CONNECTION_TIMEOUT": "7",
            "OTHER": "x",
        }
    )
    assert config.heartbeat_s == 1.5
    assert config.allow_pickle is False
    assert config.backend_priority == ("tcp", "shm")
    assert config.pool_bytes == 1000
    assert config.connection_timeout_s == 7.0


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match="pool_bytes"):
        CommConfig.from_environment({"RLINF_COMM_POOL_BYTE": "1"})
    with pytest.raises(ConfigError, match="known are"):
        CommConfig().with_values({"zzz": 1})


@pytest.mark.parametrize(
    "values",
    [
        {"heartbeat_s": "soon"},
        {"allow_pickle": "perhaps"},
        {"inline_bytes": -1},
    ],
)
def test_values_that_make_no_sense_are_an_error(values):
    with pytest.raises(ConfigError):
        CommConfig().with_values(values)


def test_every_field_is_documented_and_read_by_something():
    source = Path(rlinf.comm.__file__).parent
    code = "\n".join(
        path.read_text() for path in source.rglob("*.py") if path.name not in ("config.py",)
    )
    for field in dataclasses.fields(CommConfig):
        assert f"    {field.name}:" in inspect.getdoc(CommConfig), field.name
        assert re.search(rf"config\.{field.name}\b", code), f"nothing reads {field.name}"
