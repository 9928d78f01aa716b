"""Judges for the tests of the pool, importable by its processes."""

import contextlib
import ctypes
import os
import re
import signal
import time

from rlinf.workers.roles import Score


def make_obedient():
    """A judge that does what the response says."""
    return obey


def obey(response, item):
    match response.split():
        case ["score", value]:
            return Score(float(value))
        case ["item"]:
            return Score(float(item))
        case ["spin"]:
            while True:
                pass
        case ["regex"]:  # one call that never gives the interpreter back
            re.match(r"(a+)+$", "a" * 60 + "b")
        case ["sleep"]:
            time.sleep(3600)
        case ["exit"]:
            os._exit(3)
        case ["signal"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["memory"]:
            bytearray(1 << 40)
        case ["crash"]:
            ctypes.string_at(0)
        case ["mute"]:
            os.closerange(3, 20)
            time.sleep(3600)
        case ["chatter"]:
            for descriptor in range(3, 20):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"x" * (1 << 17))
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["print"]:
            print('[1.0, "scored"]')
            return Score(0.25)
        case ["raise"]:
            raise RuntimeError("no verdict")
    return Score(0.0, "format_error")


def make_nothing():
    raise RuntimeError("there is no judge here")
