"""The main job on a Ray cluster of two nodes: network namespaces stand for the machines.

Each node has a host name, a network and a folder for Ray's files of its own; only the run folder is
shared, as on a cluster with a common file system.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlinf.sched import Component, FlowGraph, spatial_plan

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "apps/rlhf/main.py"
ADDRESSES = {"a": "10.78.0.1", "b": "10.78.0.2"}
HEAD = f"{ADDRESSES['a']}:6379"
SHORT = (
    "steps=2",
    "sft.stop_at=0.1",
    "rollout.prompts=8",
    "rollout.samples=8",
    "checkpoint.every=1",
)
MEMORY = ("--object-store-memory", str(80 << 20))
EVERYWHERE = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""The same on every node. Whoever has no token cannot join; without the last one Ray's workers
give way to whatever else runs on the machine."""


class Nodes:
    """Two hosts with a cable between them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._tag = folder, f"rlinf{os.getpid()}"

    def build(self) -> None:
        for host in ADDRESSES:
            _ip("netns", "add", self._name(host))
            _ip("-n", self._name(host), "link", "set", "lo", "up")
        _ip(
            *("-n", self._name("a"), "link", "add", "eth0", "type", "veth"),
            *("peer", "name", "eth0", "netns", self._name("b")),
        )
        for host, address in ADDRESSES.items():
            _ip("-n", self._name(host), "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", self._name(host), "link", "set", "eth0", "up")

    def remove(self) -> None:
        for host in ADDRESSES:
            with contextlib.suppress(OSError):
                _ip("netns", "del", self._name(host))

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """What runs `words` on a host; Ray's files, /tmp/ray, are the host's own."""
        own = self._folder / host
        own.mkdir(exist_ok=True)
        setup = f'hostname node-{host} && mkdir -p /tmp/ray && mount --bind "{own}" /tmp/ray'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", f'{setup} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self._name(host), *inside, *words]

    def _name(self, host: str) -> str:
        return f"{self._tag}{host}"


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the commands `ip` and `unshare` to make network namespaces")
    nodes = Nodes(tmp_path)
    try:
        try:
            nodes.build()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield nodes
    finally:
        nodes.remove()


@contextlib.contextmanager
def ray_node(nodes: Nodes, host: str, *words: str) -> Iterator[None]:
    """`ray start` on a host, in the foreground, until the block ends."""
    own = ("--node-ip-address", ADDRESSES[host], "--num-cpus", "1", "--block")
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *own, *MEMORY]
    with subprocess.Popen(
        nodes.command(host, start),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | EVERYWHERE,
    ) as process:
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if "Ray runtime started" in line:
                    break
            else:
                pytest.fail(f"ray did not start on {host}: {said}")
            yield
        finally:
            process.terminate()
            process.wait(60)


def rewards(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_the_main_job_runs_on_two_nodes_as_on_one(nodes: Nodes, tmp_path: Path) -> None:
    program = [sys.executable, str(MAIN), *SHORT]
    alone = [*program, "launcher=inline", f"folder={tmp_path / 'one'}"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    plan = tmp_path / "plan.yaml"
    graph = FlowGraph.chain(Component("rollout", (1,)), Component("trainer", (1,)))
    spatial_plan(graph, ["node-a/core:0", "node-b/core:0"], batch=8, micro_batches=8).save(plan)
    with ray_node(nodes, "a", "--head", "--port=6379"), ray_node(nodes, "b", f"--address={HEAD}"):
        for name, chosen in (("two", plan), ("named", "spatial")):
            joined = [f"cluster.ray_address={HEAD}", f"plan={chosen}", f"folder={tmp_path / name}"]
            done = subprocess.run(
                nodes.command("a", [*program, *joined]),
                capture_output=True,
                text=True,
                timeout=400,
                env=os.environ | EVERYWHERE,
            )
            assert done.returncode == 0, done.stderr
    assert max(rewards(tmp_path / "one")) > 0
    for name in ("two", "named"):
        assert rewards(tmp_path / name) == pytest.approx(rewards(tmp_path / "one"), abs=1e-6)
