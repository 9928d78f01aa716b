"""Programs of a model: what they print, what stops them, and what they cannot do."""

import pytest

from rlinf.workers.roles import Tool
from rlinf.workers.tools.python_tool import PythonConfig, PythonTool

TOOL = PythonTool(PythonConfig(seconds=1, memory_bytes=1 << 28, answer_bytes=200))


def run(program):
    [answer] = TOOL.call([program], 60.0)
    return answer


def test_what_is_printed_is_the_answer():
    assert isinstance(TOOL, Tool)
    assert TOOL.call(["print(6 * 7)", "x = 2\nx ** 10", "x = 1"], 60.0) == [
        "42",
        "1024",
        "nothing was printed",
    ]
    assert run("import math; math.factorial(10)") == "3628800"


def test_an_error_is_an_answer():
    assert run("1 / 0") == "ZeroDivisionError: division by zero"
    assert run("print('a')\nraise ValueError('b')") == "a\nValueError: b"
    assert run("if").startswith("SyntaxError")
    assert run("raise SystemExit(3)") == "nothing was printed"
    assert run("def f(): f()\nf()").startswith("RecursionError")


def test_a_program_that_does_not_end_is_ended():
    assert run("print('begun', flush=True)\nwhile True: pass") == "begun\nit took longer than 1 s"


def test_one_that_waits_is_ended_at_the_deadline():
    [answer] = TOOL.call(["import time; time.sleep(1000)"], 0.5)
    assert answer == "it took longer than 1 s"


def test_memory_and_output_are_bounded():
    assert run("len(bytearray(1 << 30))") == "MemoryError"
    assert run("while True: print('a' * 100)").endswith("a\n(more was printed)")


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "open('file', 'w')",
        "import os; os.remove('/tmp/none')",
        "import ctypes; ctypes.CDLL(None)",
        "import os; os.kill(1, 0)",
    ],
)
def test_what_is_out_of_bounds(program):
    assert "PermissionError" in run(program)


def test_it_does_not_see_our_environment():
    assert run("import os; sorted(set(os.environ) - {'LC_CTYPE'})") == "[]"
