"""Job: how a tool outside finds the registry of a running job.

The program that owns the registry announces it in a small file which only its user can read, as it
holds the job's token, and removes it at the end. Files of programs that are gone are swept away.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from rlinf.channel.config import runtime_folder
from rlinf.comm.host import host_id

log = logging.getLogger(__name__)

SUFFIX = ".job.json"
MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Job:
    """A running job.

    Attributes:
        address: Of its registry, as `RegistryServer.address`.
        token: Of its registry, hexadecimal. Whoever has it can run code in the job.
        server: The worker that hosts the channels.
        controller: The worker that tells of the others, where there is one.
        program: What runs, in words.
        pid: The process that owns the registry; 0: not known.
        started: When that process started, in the kernel's ticks: tells it from a later process
            of the same number; 0: not known.
        host: The machine and its namespaces, as `rlinf.comm.host.host_id`.
    """

    address: str
    token: str = field(repr=False)
    server: str = "channel/0"
    program: str = ""
    pid: int = 0
    started: int = 0
    host: str = ""
    controller: str = "controller/0"

    @property
    def is_local(self) -> bool:
        """Its process can be seen from here."""
        return bool(self.pid) and self.host == host_id()

    def is_alive(self) -> bool:
        """Whether its process still runs; one that cannot be seen from here is believed to."""
        return not self.is_local or _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"{self.pid} ({self.program})" if self.pid else f"at {self.address}"


@contextlib.contextmanager
def announce(address: str, token: bytes, *, server: str = "channel/0") -> Iterator[Path | None]:
    """Let tools of this user find the registry for the length of the block.

    Where the folder cannot be trusted or written to, the job goes on unseen; the log says why.

    Returns:
        The file, for a tool on another host to be given.
    """
    name = "/".join(Path(sys.argv[0] or "python").parts[-2:])
    program = " ".join([name, *sys.argv[1:]])
    pid = os.getpid()
    job = Job(address, token.hex(), server, program, pid, _started(pid), host_id())
    path: Path | None = None
    try:
        path = _write(job)
    except OSError as error:
        log.warning("rlinf-monitor will not find this job by itself: %s", error)
    try:
        yield path
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def running_jobs(folder: Path | None = None) -> tuple[Job, ...]:
    """The jobs of this user on this machine, oldest first; removes what dead ones left behind."""
    folder = folder or runtime_folder()
    found: list[Job] = []
    if folder.is_dir() and _is_private(folder):
        for path in folder.glob(f"*{SUFFIX}"):
            try:
                job = read_job(path)
            except (OSError, ValueError) as error:
                log.warning("passed over %s: %s", path, error)
                continue
            if not job.is_alive():
                path.unlink(missing_ok=True)
            elif job.is_local:
                found.append(job)
    return tuple(sorted(found, key=lambda job: (job.started, job.pid)))


def read_job(path: Path) -> Job:
    """The job that a file announces.

    Raises:
        OSError: It cannot be read.
        ValueError: It announces nothing.
    """
    with path.open("rb") as file:
        data = json.loads(file.read(MAX_FILE_BYTES))
    kinds = {one.name: one.type for one in fields(Job)}
    good = isinstance(data, dict) and data.keys() <= kinds.keys()
    if not good or not all(isinstance(value, kinds[name]) for name, value in data.items()):  # type: ignore[arg-type]
        raise ValueError("it does not describe a job")
    try:
        return Job(**data)
    except TypeError:
        raise ValueError("it names no address or no token") from None


def _write(job: Job) -> Path:
    """Written beside and renamed, so that nobody reads half of it."""
    folder = runtime_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not a folder of this user alone (mode 0700)")
    running_jobs(folder)
    path = folder / f"{job.pid}-{job.started}-{job.token[:8]}{SUFFIX}"
    beside = path.with_suffix(".part")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(job), file)
    return beside.rename(path)


def _is_private(folder: Path) -> bool:
    state = folder.lstat()
    return folder.is_dir() and state.st_uid == os.getuid() and not state.st_mode & 0o077


def is_gone(pid: int) -> bool:
    """Whether no process of that number runs on this host."""
    return pid > 0 and not _started(pid)


def _started(pid: int) -> int:
    """When a process started, in ticks since boot; 0 where that cannot be told or it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return 0 if rest[0] in "ZX" else int(rest[19])
