"""Everything in this process, one thread a program: for pdb, for tests, for small machines.

Messages are encoded all the same, and go through the in-process transport.
"""

import ctypes
import logging
import threading
import time
import traceback

from rlinf.comm import RegistryServer
from rlinf.workers.devices import Node, local_cores
from rlinf.workers.launch.base import Ended, Launcher, Link, Process, Program
from rlinf.workers.launch.config import keep_freed_memory

__all__ = ["InlineLauncher"]

log = logging.getLogger(__name__)
JOIN_S = 1.0


class InlineLauncher(Launcher):
    """Runs programs on threads. A thread cannot be killed: `kill` only stops watching it."""

    def __init__(self) -> None:
        keep_freed_memory()
        self.registry = RegistryServer()
        self._threads: list[_Thread] = []

    def nodes(self) -> tuple[Node, ...]:
        """This machine."""
        return (Node("", (("core", len(local_cores())),)),)

    def start(self, program: Program, ended: Ended) -> Process:
        """Start the program on a thread of its own."""
        thread = _Thread(program, Link(self.registry), ended)
        self._threads.append(thread)
        return thread

    def close(self) -> None:
        """Wait a little for threads which were told to end; end those that are busy with Python.

        One that is in the middle of C++ while the interpreter is torn down would take the whole
        process with it ("terminate called").
        """
        for thread in self._left():
            thread.interrupt()
        for thread in self._left():
            log.info("%s is still busy and cannot be ended before this process", thread.name)
        self.registry.close()

    def _left(self) -> list["_Thread"]:
        """Those that do not end within `JOIN_S` from now."""
        deadline = time.monotonic() + JOIN_S
        return [t for t in self._threads if not t.join(max(0.0, deadline - time.monotonic()))]


class _Thread(Process):
    def __init__(self, program: Program, link: Link, ended: Ended) -> None:
        self.name = program.id
        self._program, self._link, self._ended = program, link, ended
        self._thread = threading.Thread(target=self._run, name=program.id, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._program.run(self._link)
        except SystemExit as error:
            self._ended(f"it called sys.exit({error.code!r})")
        except BaseException as error:  # noqa: BLE001 - a thread's edge; reported
            log.debug("%s ended with an error\n%s", self.name, traceback.format_exc())
            self._ended(f"{type(error).__name__}: {error}")
        else:
            self._ended("it ended by itself")

    def kill(self) -> None:
        """Nothing: a thread cannot be killed. What it still says is not listened to."""

    def interrupt(self) -> None:
        """Have it raise SystemExit at the next line of Python it comes to."""
        number = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
