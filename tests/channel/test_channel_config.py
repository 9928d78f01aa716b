"""What a configuration file may say about a channel."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import rlinf.channel.config as config_module
from rlinf.channel import ChannelConfig, InvalidConfig
from rlinf.channel.config import parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("10GB", 10**10), ("8GiB", 8 * 2**30), ("1.5 kB", 1500), ("512", 512), (7, 7), ("3b", 3)],
)
def test_sizes_are_read(text: object, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["10 pints", "GB", "-3GB", "", True, 1.5])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(InvalidConfig):
        parse_bytes(text)


def test_the_sources_own_example_is_accepted() -> None:
    config = ChannelConfig.from_dict(
        {"type": "weighted", "buffer_size": "10GB", "offload_to_cpu": True}
    )
    assert config.buffer_bytes == 10**10 and config.type == "weighted"


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'buffer_size'"):
        ChannelConfig.from_dict({"bufer_size": "10GB"})


@pytest.mark.parametrize(
    "values",
    [
        {"buffer_size": 0},
        {"max_items": 0},
        {"lease_s": 0.0},
        {"prefetch_items": 0},
        {"put_window_items": -1},
        {"prefetch_s": -1.0},
        {"put_window_bytes": "none"},
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig):
        ChannelConfig.from_dict(values)


def test_differences_are_named() -> None:
    assert (
        ChannelConfig().differences(ChannelConfig(max_items=3)) == "max_items: None here, 3 there"
    )


def test_every_setting_is_read_by_something() -> None:
    folder = Path(config_module.__file__).parent
    read = {
        node.attr
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert {field.name for field in fields(ChannelConfig)} - read - {"buffer_size"} - {
        "put_window_bytes"
    } == set()
