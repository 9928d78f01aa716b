"""Checkpoints: folders that are complete or do not count.

    checkpoints/step-000010/     a file or more for each worker, then `manifest.json`
    checkpoints/step-000020/

A checkpoint is written into a folder that nobody looks at (its name begins with a dot); each worker
writes and syncs its own files there and says what they hold (`SavedFile`); then the manifest is
written, with the size and the hash of every file and a hash of itself, and the folder is renamed.
A crash at any moment leaves the checkpoints before it as they were.

Whoever writes and whoever reads must see the same file system. Nothing here is pickled.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf.workers.bounds import Count, Natural
from rlinf.workers.errors import CheckpointFailed, CheckpointTorn

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "Checkpoints",
    "Draft",
    "SavedFile",
    "newest_checkpoint",
    "seal",
]

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 20
NAME = re.compile(r"step-(\d{6,})")
DRAFT, DOOMED, ASIDE = ".draft-", ".old-", "aside-"


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written.

    Attributes:
        every: Steps between two; 0: none but the one at the end of the run, however it ends well.
        keep: How many to keep, the newest ones; at least 1.
    """

    every: Natural = 10
    keep: Count = 2


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of a checkpoint that is on the disk. `sha256` is hexadecimal."""

    name: str
    nbytes: int
    sha256: str


def seal(path: Path) -> SavedFile:
    """Bring a written file to the disk and say what it holds."""
    _sync(path)
    return _described(path)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: Where its files are.
        step: Steps that were done when it was written.
        files: All of them but the manifest.
        state: What the program noted beside the workers' files, as JSON has it.
    """

    folder: Path
    step: int
    files: tuple[SavedFile, ...]
    state: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        """Read and check a checkpoint, every byte of it. Raises `CheckpointTorn`."""
        content = _read_manifest(folder)
        files = tuple(SavedFile(**entry) for entry in content["files"])
        for file in files:
            _check(folder, file)
        return cls(folder, content["step"], files, content["state"])


class Draft:
    """A checkpoint that is being written. Leaving the context without `commit` discards it."""

    def __init__(self, owner: "Checkpoints", step: int) -> None:
        self._owner, self._step = owner, step
        self.folder = Path(tempfile.mkdtemp(prefix=DRAFT, dir=owner.folder))

    def __enter__(self) -> "Draft":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self, files: Sequence[SavedFile], state: Mapping[str, Any]) -> Checkpoint:
        """Make it count, and forget those that are too many.

        Raises:
            CheckpointFailed: A file is missing or cannot be written; nothing has changed.
        """
        try:
            return self._commit(files, state)
        except OSError as error:
            raise CheckpointFailed(
                f"the checkpoint of step {self._step} was not written to {self._owner.folder}: "
                f"{error}; those before it are as they were"
            ) from error

    def _commit(self, files: Sequence[SavedFile], state: Mapping[str, Any]) -> Checkpoint:
        for file in files:
            found = (self.folder / file.name).stat().st_size
            if found != file.nbytes:
                raise OSError(f"{file.name} has {found} bytes here and {file.nbytes} at its writer")
        entries = [asdict(file) for file in files]
        content = {"format": FORMAT, "step": self._step, "files": entries, "state": state}
        manifest = self.folder / MANIFEST
        manifest.write_text(json.dumps({"sha256": _hash(content), "content": content}, indent=1))
        seal(manifest)
        _sync(self.folder)
        target = self._owner.folder / f"step-{self._step:06d}"
        if target.exists():  # a torn one, or one of a course of the run that was given up
            _doom(target)
        self.folder.rename(target)
        _sync(self._owner.folder)
        self._owner.prune()
        return Checkpoint(target, self._step, tuple(files), state)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: Where they are; made when the first is written. One process at a time may write
            there: what others left unfinished is removed.
        config: When they are written.
        origin: The one the run goes on from, in this folder or another; None: it begins.
        about: What else to note in each, as JSON has it, such as configuration and plan.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig | None = None,
        origin: Checkpoint | None = None,
        about: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.folder, self.config, self.about = folder, config or CheckpointConfig(), about
        self._origin = origin
        if origin is not None and (other := _differences(origin.state, about())):
            log.warning("going on from %s with other settings: %s", origin.folder, ", ".join(other))

    def draft(self, step: int) -> Draft:
        """Begin the checkpoint of a step. Raises `CheckpointFailed`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".*"):
                if left.name.startswith((DRAFT, DOOMED)):
                    shutil.rmtree(left, ignore_errors=True)
            return Draft(self, step)
        except OSError as error:
            text = f"cannot write checkpoints to {self.folder}: {error.strerror}"
            raise CheckpointFailed(text) from error

    def newest(self) -> Checkpoint | None:
        """What the run goes back to: its newest complete one, or its origin."""
        return newest_checkpoint(self.folder) or self._origin

    def set_aside_after(self, step: int) -> None:
        """Rename those of later steps: they are torn, or the run goes on on another course."""
        for folder in _finished(self.folder):
            if _step_of(folder) > step:
                away = folder.with_name(f"{ASIDE}{folder.name}")
                shutil.rmtree(away, ignore_errors=True)
                folder.rename(away)
                log.warning("%s is not gone on from; it was renamed to %s", folder, away.name)

    def prune(self) -> None:
        """Remove all but the newest. Each is renamed first, so that none is seen half removed."""
        for folder in _finished(self.folder)[self.config.keep :]:
            _doom(folder)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete one in `folder`; those that are not are named in the log."""
    for found in _finished(folder):
        try:
            return Checkpoint.load(found)
        except CheckpointTorn as error:
            log.warning("%s; it is passed over", error)
    return None


def _differences(old: object, new: object, where: str = "") -> list[str]:
    """Where two nested mappings differ, in those keys that both have."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return [] if old == new else [f"{where} {old} -> {new}"]
    both = [key for key in old if key in new]
    return [d for k in both for d in _differences(old[k], new[k], f"{where}.{k}".lstrip("."))]


def _finished(folder: Path) -> list[Path]:
    """Those that have their name, the newest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((f for f in found if NAME.fullmatch(f.name)), key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _doom(folder: Path) -> None:
    away = folder.with_name(f"{DOOMED}{folder.name}")
    shutil.rmtree(away, ignore_errors=True)
    folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def _read_manifest(folder: Path) -> Mapping[str, Any]:
    try:
        read = json.loads((folder / MANIFEST).read_text())
        content: Mapping[str, Any] = read["content"]
        whole = read["sha256"] == _hash(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointTorn(f"checkpoint {folder}: no manifest can be read ({error})") from error
    if not whole:
        raise CheckpointTorn(f"checkpoint {folder}: its manifest was changed or is torn")
    if content["format"] != FORMAT:
        text = f"checkpoint {folder} has format {content['format']}; this version reads {FORMAT}"
        raise CheckpointTorn(text)
    return content


def _check(folder: Path, expected: SavedFile) -> None:
    try:
        found = _described(folder / expected.name)
    except OSError as error:
        raise CheckpointTorn(f"checkpoint {folder}: {expected.name}: {error.strerror}") from error
    if found != expected:
        raise CheckpointTorn(
            f"checkpoint {folder}: {expected.name} is not what was written: it has {found.nbytes} "
            f"of {expected.nbytes} bytes and the hash {found.sha256[:12]}"
        )


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _described(path: Path) -> SavedFile:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
        return SavedFile(path.name, file.tell(), digest.hexdigest())


def _sync(path: Path) -> None:
    """Bring a file's bytes, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
