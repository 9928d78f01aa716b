"""The process in which a program of a model runs: `python -I python_process.py SECONDS BYTES`.

The program comes on the standard input; what it prints goes to the standard output, and so does the
value of its last line where that is an expression, or the error that ended it. Imported by nobody.

Limits are set before its first line runs: processor time, memory, open files, no file to
write, no other process, and no network (a namespace of its own where the kernel gives one). The
audit hook of Python refuses what would get around that by accident; against an attacker it is no
wall.
"""

import ast
import ctypes
import resource
import sys

REFUSED: tuple[str, ...] = ("socket.", "subprocess.", "os.system", "os.fork", "os.exec", "shutil.")
REFUSED += ("os.posix_spawn", "os.spawn", "os.kill", "os.remove", "os.rename", "os.rmdir")
REFUSED += ("os.mkdir", "ctypes.")
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
OPEN_FILES = 32


def main() -> None:
    """Run the program."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    program = sys.stdin.read()
    ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK)  # where it fails, the hook is left
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    sys.addaudithook(_audit)
    try:
        _run(program)
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 - the program's own, whatever it is
        sys.stdout.flush()
        print(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    sys.stdout.flush()


def _run(program: str) -> None:
    tree = ast.parse(program)
    last = tree.body[-1] if tree.body else None
    names: dict[str, object] = {"__name__": "__main__"}
    value = None
    if isinstance(last, ast.Expr):
        tree.body.pop()
        exec(compile(tree, "program", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "program", "eval"), names)
    else:
        exec(compile(tree, "program", "exec"), names)
    if value is not None:
        print(value)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not allowed here")
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise PermissionError("writing files is not allowed here")


if __name__ == "__main__":
    main()
