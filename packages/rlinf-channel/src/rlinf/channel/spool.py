"""The spool: a folder in which a server's journal outlives the server.

One append-only log at a time, ``000001.log``: frames of a magic word, a checksum and a length,
each holding one unit of `ledger`. Space for a frame is allocated before anything is decided, with
some to spare for acknowledgements, so a full disk refuses a put as a whole and stops nobody from
working off what is there. When most of the log is history, what it adds up to is written to the
next file, which takes the log's place in one step (`rename`).

A frame that was not written whole ends the log when it is read again: nobody was told of it. One
that is damaged before others which are whole is an error.
"""

import errno
import fcntl
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rlinf.channel.config import SpoolConfig
from rlinf.channel.errors import SpoolFailed, SpoolFull, SpoolUnusable
from rlinf.channel.journal import Record, ServerState
from rlinf.channel.ledger import Parts, decode, encode, encode_state

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"RLf1"
OVERHEAD_BYTES = 4096
"""More than head and header of a put of `BLOCK_ITEMS` items without long keys."""
SPARE_BYTES = 1 << 20
"""Kept allocated for what must not be refused: acknowledgements, and the end of grants."""
STEP_BYTES = 8 << 20
"""Space is allocated in steps of this size, or as much as is needed where there is less."""
MAX_PIECES = 512
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Spool:
    """The journal of one server on disk. Not thread-safe: its owner serialises the calls.

    Args:
        config: Where, and what a write must survive.

    Attributes:
        state: What was found in it; empty once the owner has taken it over.

    Raises:
        SpoolUnusable: The folder cannot be written, belongs to another server that runs, or is
            damaged.
    """

    def __init__(self, config: SpoolConfig) -> None:
        self.config = config
        self.folder = Path(config.folder)
        self.state = ServerState()
        self._file = -1
        self._end = self._allocated = 0
        self._broken: SpoolFailed | None = None
        self._number = 1
        self._tidy_at = config.tidy_size
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SpoolUnusable(str(self.folder), str(error)) from error
        try:
            self._open()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError) and not isinstance(error, SpoolUnusable):
                raise SpoolUnusable(str(self.folder), str(error)) from error
            raise

    @property
    def nbytes(self) -> int:
        """Of the log."""
        return self._end

    def reserve(self, nbytes: int) -> None:
        """See that a put of so many bytes can be written.

        Raises:
            SpoolFull: It cannot; nothing has changed.
            SpoolFailed: Nothing can be written any more.
        """
        self.check()
        needed = self._end + nbytes + OVERHEAD_BYTES + SPARE_BYTES
        if needed > self._allocated:
            try:
                self._allocate(needed)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise self._fail(error) from error
                reason = f"{self.folder}: {os.strerror(error.errno or 0)}"
                raise SpoolFull("", reason) from error

    def write(self, records: Iterable[Record]) -> None:
        """Append the records of one step: all of them or none.

        Raises:
            SpoolFailed: The disk does not take them; from now on nothing is written.
        """
        self.check()
        try:
            self._end = self._append(self._file, self._end, encode(records))
            self._allocated = max(self._allocated, self._end)
            if self.config.sync == "disk":
                os.fdatasync(self._file)
        except OSError as error:
            raise self._fail(error) from error

    @property
    def untidy(self) -> bool:
        """Whether it is time to call `tidy`."""
        return self._end >= self._tidy_at

    def tidy(self, state: ServerState) -> None:
        """Go on with a log that begins with what all records so far add up to.

        Where there is no space for it the log goes on as it is.
        """
        self.check()
        path = self._path(self._number + 1)
        fresh = path.with_suffix(".tmp")
        file = -1
        try:
            file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            end = self._append(file, 0, encode_state(state))
            os.fsync(file)
            fresh.rename(path)
        except OSError as error:
            log.warning("spool %s: cannot tidy up: %s", self.folder, error)
            if file >= 0:
                os.close(file)
            fresh.unlink(missing_ok=True)
            self._tidy_at = self._end + self.config.tidy_size
            return
        self._sync_folder()
        os.close(self._file)
        self._path(self._number).unlink(missing_ok=True)
        self._number += 1
        self._file, self._end, self._allocated = file, end, end
        self._tidy_at = max(self.config.tidy_size, 3 * end)

    def check(self) -> None:
        """Raises what made the spool fail, if it has."""
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """Give the folder free."""
        if self._file >= 0:
            with suppress(OSError):  # only what was allocated ahead is left otherwise
                os.ftruncate(self._file, self._end)
            os.close(self._file)
            os.close(self._lock)
            self._file = -1
        self._broken = self._broken or SpoolFailed(str(self.folder), "it is closed")

    # Inside

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.log"

    def _open(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another server that runs uses it"
            raise SpoolUnusable(str(self.folder), reason) from None
        for left in self.folder.glob("*.tmp"):
            left.unlink()
        logs = sorted(self.folder.glob("[0-9]*.log"))
        for old in logs[:-1]:
            old.unlink()
        if logs:
            self._number = int(logs[-1].stem)
        path = self._path(self._number)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        if size:
            self._end = self._read(path, size)
            os.ftruncate(self._file, self._end)
        self._allocated = self._end
        self._sync_folder()

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self, path: Path, size: int) -> int:
        """Take everything in that is whole; where it ends."""
        with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as log_bytes:
            at = 0
            while (unit := _unit(log_bytes, at)) is not None:
                try:
                    decode(memoryview(unit), self.state)
                except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
                    reason = f"{path} makes no sense at byte {at}: {error!r}"
                    raise SpoolUnusable(str(self.folder), reason) from error
                at += _HEAD.size + len(unit)
            rest = log_bytes.find(_MAGIC, at + 1)
            while rest >= 0:
                if _unit(log_bytes, rest) is not None:
                    reason = (
                        f"{path} is damaged at byte {at}, and goes on at byte {rest}; cut it there "
                        f"to go on with what came before, or move it away to begin anew"
                    )
                    raise SpoolUnusable(str(self.folder), reason)
                rest = log_bytes.find(_MAGIC, rest + 1)
            if any(log_bytes[at : at + _HEAD.size]):
                log.warning(
                    "spool %s: a record at byte %d was not written whole and is left out; nobody "
                    "was told of it",
                    path,
                    at,
                )
        return at

    def _allocate(self, needed: int) -> None:
        try:
            target = max(needed, self._allocated + STEP_BYTES)
            os.posix_fallocate(self._file, self._allocated, target - self._allocated)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            target = needed
            os.posix_fallocate(self._file, self._allocated, target - self._allocated)
        self._allocated = target

    @staticmethod
    def _append(file: int, at: int, parts: Parts) -> int:
        """Write one frame; where it ends."""
        checksum = length = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
            length += memoryview(part).nbytes
        pieces = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        pieces.insert(0, memoryview(_HEAD.pack(_MAGIC, checksum, length)))
        while pieces:
            written = os.pwritev(file, pieces[:MAX_PIECES], at)
            at += written
            while pieces and written >= pieces[0].nbytes:
                written -= pieces.pop(0).nbytes
            if written:
                pieces[0] = pieces[0][written:]
        return at

    def _fail(self, error: OSError) -> SpoolFailed:
        self._broken = SpoolFailed(str(self.folder), str(error))
        log.error("%s", self._broken)
        return self._broken


def _unit(log_bytes: mmap.mmap, at: int) -> bytes | None:
    """The unit of the frame that begins here, if it is whole."""
    head = log_bytes[at : at + _HEAD.size]
    if len(head) < _HEAD.size:
        return None
    magic, checksum, length = _HEAD.unpack(head)
    begin = at + _HEAD.size
    if magic != _MAGIC or not 0 < length <= len(log_bytes) - begin:
        return None
    unit = log_bytes[begin : begin + length]
    return unit if zlib.crc32(unit) == checksum else None
