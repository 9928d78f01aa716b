"""rlinf-doctor: what works on this machine, what does not, and the one line that changes it.

    rlinf-doctor          a table for people
    rlinf-doctor --json   the same for programs
    rlinf-doctor --ray-address HOST:PORT   looks at that cluster too

Exits with 0 where everything works that an installed package needs; with 1 where something of that
is missing or cannot work. Optional parts that are not there are listed and are no failure.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from packaging.requirements import Requirement

__all__ = ["Finding", "examine", "judge", "main", "render", "requirements"]

State = Literal["ok", "absent", "broken"]

PACKAGES = ("rlinf-comm", "rlinf-channel", "rlinf-sched", "rlinf-workers")
MARKS: dict[State, str] = {"ok": "ok", "absent": "-", "broken": "FAIL"}
PYTHON = (3, 11)
ROOMY_BYTES = 4 << 30
"""The main job's processes take 2.9 GB together (peak_rss_bytes of its summary)."""
MANY_FILES = 4096
"""Each connected peer costs two descriptors, each mapped pool one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    area: str
    name: str
    state: State
    said: str
    """What was found."""
    remedy: str = ""
    """The line that changes it; empty where nothing need change."""


def examine(ray_address: str = "") -> list[Finding]:
    """Look at everything. Starts no process and touches no accelerator beyond asking for it.

    Args:
        ray_address: Of a running Ray cluster, "host:port"; empty: none is to be joined.
    """
    looks = (_machine(), _sockets(), _packages(), _transports(), _accelerator(), _ray(ray_address))
    return list(itertools.chain.from_iterable(looks))


def requirements(package: str) -> list[tuple[Requirement, str]]:
    """What an installed distribution requires, each with the extra that brings it, or ''."""
    found = []
    for text in importlib.metadata.requires(package) or ():
        requirement = Requirement(text)
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", str(requirement.marker or ""))
        found.append((requirement, extra.group(1) if extra else ""))
    return found


def judge(package: str, requirement: Requirement, extra: str, installed: str | None) -> Finding:
    """Whether a requirement of `package` is met by the version that is installed, if any is."""
    area = "optional" if extra else "packages"
    wanted = f"{requirement.name}{requirement.specifier}"
    source = f"{package}[{extra}]" if extra else package
    if installed is None:
        state: State = "absent" if extra else "broken"
        said = f"not installed; {package} uses it" if extra else f"{package} needs it"
        remedy = f"pip install '{source}'" if extra else f"pip install '{wanted}'"
        return Finding(area, requirement.name, state, said, remedy)
    if requirement.specifier.contains(installed, prereleases=True):
        return Finding(area, requirement.name, "ok", installed)
    said = f"{installed}, but {source} needs {requirement.specifier}"
    return Finding(area, requirement.name, "broken", said, f"pip install '{wanted}'")


def render(findings: Iterable[Finding]) -> str:
    """The table, an area after the other."""
    rows = list(findings)
    width = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    area = ""
    for row in rows:
        if row.area != area:
            area = row.area
            lines += ["", area]
        lines.append(f"  {MARKS[row.state]:<5}{row.name:<{width}}  {row.said}")
        if row.remedy:
            lines.append(f"  {'':<5}{'':<{width}}  -> {row.remedy}")
    broken = sum(row.state == "broken" for row in rows)
    verdict = f"{broken} to be mended" if broken else "everything that is needed works"
    return "\n".join([*lines[1:], "", verdict])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="rlinf-doctor",
        description="Says what works on this machine, and the line that changes what does not.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list of findings")
    parser.add_argument("--ray-address", default="", help="a running Ray cluster, host:port")
    options = parser.parse_args(argv)
    found = examine(options.ray_address)
    print(json.dumps([asdict(row) for row in found], indent=2) if options.json else render(found))
    return int(any(row.state == "broken" for row in found))


# -- what is looked at ------------------------------------------------------------------------


def judge_machine(cores: int, free_bytes: int, files: int) -> list[Finding]:
    """Whether the cores, the memory and the descriptors a process may open suffice."""
    gib = free_bytes / (1 << 30)
    roomy = free_bytes >= ROOMY_BYTES
    enough = files >= MANY_FILES
    return [
        Finding("machine", "cores", "ok", f"{cores} for this process"),
        Finding(
            "machine",
            "memory",
            "ok" if roomy else "broken",
            f"{gib:.1f} GiB free",
            "" if roomy else f"{ROOMY_BYTES >> 30} GiB are wanted: end something, or raise a limit",
        ),
        Finding(
            "machine",
            "open files",
            "ok" if enough else "broken",
            f"{files} for a process",
            "" if enough else f"ulimit -n {MANY_FILES}",
        ),
    ]


def _machine() -> Iterator[Finding]:
    import resource

    from rlinf.comm.pool import available_bytes

    current = platform.python_version()
    right = sys.version_info >= PYTHON
    remedy = "" if right else f"install Python {'.'.join(map(str, PYTHON))}"
    yield Finding("machine", "Python", "ok" if right else "broken", current, remedy)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield from judge_machine(len(os.sched_getaffinity(0)), available_bytes(), files)


def _sockets() -> Iterator[Finding]:
    for name, attempt, remedy in (
        (
            "loopback TCP",
            _listen,
            "allow sockets on 127.0.0.1 (a sandbox or firewall refuses them)",
        ),
        ("shared memory", _share, "allow memfd_create; without it messages go over sockets"),
    ):
        try:
            attempt()
        except (OSError, AttributeError) as error:
            yield Finding("machine", name, "broken", str(error), remedy)
        else:
            yield Finding("machine", name, "ok", "works")


def _listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5.0).close()


def _share() -> None:
    fd = os.memfd_create("rlinf-doctor")
    try:
        os.posix_fallocate(fd, 0, 1 << 20)
    finally:
        os.close(fd)


def _packages() -> Iterator[Finding]:
    wanted: list[tuple[str, Requirement, str]] = []
    for package in PACKAGES:
        version = _installed(package)
        if version is None:
            remedy = f"pip install {package}"
            yield Finding("packages", package, "absent", "not installed", remedy)
            continue
        yield Finding("packages", package, "ok", version)
        wanted += [(package, *found) for found in requirements(package)]
    seen = set(PACKAGES)
    for package, requirement, extra in sorted(wanted, key=lambda row: row[2] != ""):
        if requirement.name not in seen:
            seen.add(requirement.name)
            yield judge(package, requirement, extra, _installed(requirement.name))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _transports() -> Iterator[Finding]:
    from rlinf.comm.plugins import transports

    usable, missing = transports()
    for name in usable:
        yield Finding("transports", name, "ok", "usable")
    for name, reason in missing.items():
        yield Finding("transports", name, "absent", reason)


def _accelerator() -> Iterator[Finding]:
    from rlinf.comm.accelerator import local_device

    device = local_device()
    if device.kind == "cpu":
        said = "none that torch sees: everything runs on the CPU"
        yield Finding("accelerator", "torch", "absent", said)
    else:
        yield Finding("accelerator", "torch", "ok", str(device))


def _ray(address: str) -> Iterator[Finding]:
    if not address:
        yield Finding("ray", "cluster", "ok", "a run starts one of its own, and ends it")
        return
    host, _, port = address.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, ValueError) as error:
        said = f"{address} does not answer: {error}"
        yield Finding("ray", "cluster", "broken", said, "on its head node: ray start --head")
    else:
        yield Finding("ray", "cluster", "ok", f"{address} answers")


if __name__ == "__main__":
    sys.exit(main())
