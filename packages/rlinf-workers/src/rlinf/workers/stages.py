"""`@stage` marks the chunk functions of a worker class."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, overload

__all__ = [
    "Again",
    "Stage",
    "at_once",
    "is_at_once",
    "holds_state",
    "public_methods",
    "stage",
    "stages",
]

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__rlinf_stage__"
AT_ONCE = "__rlinf_at_once__"
HOOKS = ("close", "count_tokens", "recovered")


@dataclass(frozen=True, slots=True)
class Again:
    """An output of a ring's head that goes round once more; any other leaves the ring."""

    value: Any


@dataclass(frozen=True, slots=True)
class Stage:
    """What `@stage` notes on a function.

    Attributes:
        finish: Name of the method to run after the last chunk, under the same devices.
        streaming: The function yields (index of the input, output), or lists of them, as outputs
            get ready.
    """

    finish: str = ""
    streaming: bool = False


@overload
def stage(function: F) -> F: ...
@overload
def stage(*, finish: str = "") -> Callable[[F], F]: ...
def stage(function: F | None = None, *, finish: str = "") -> F | Callable[[F], F]:
    """Mark a method as a stage: called through the group it takes channels in place of items.

    The method takes a list of items as its first argument, and
    - returns a list with one output an item, in the same order; or
    - returns `(outputs, weights)`, two lists of equal length, however many; or
    - is a generator of `(index of the item, output)` or `(index, output, weight)` in the order of
      completion, or of lists of those that complete together; each output is passed on at once,
      and each index must come exactly once.
    Without an output channel it may return anything; its values come back in the `StageReport`.

    In a ring (`Cluster.ring`), `(input, output, ring, ...)` makes it the head: it takes from its
    input and from the ring's end, and each of the outputs in its list leaves, or goes round
    (`Again`).

    Called through the group with `(input, output, *args, **kwargs)`, the framework loops: take a
    chunk as large as the plan says, hold the devices if they are shared, call, commit the outputs
    and acknowledge the chunk in one step, until the input is closed and empty.

    Args:
        function: The method.
        finish: Name of a method without arguments to call after the last chunk. The worker is then
            taken to hold state, which a restart alone does not bring back.
    """
    if function is None:
        return lambda real: _mark(real, finish)
    return _mark(function, finish)


def at_once(function: F) -> F:
    """Mark a method as one that is carried out when it is called, beside a stage under way.

    It runs on the thread that takes in messages, so it must be quick, wait for nobody, and share
    what it touches with the main thread safely.
    """
    setattr(function, AT_ONCE, True)
    return function


def is_at_once(cls: type, method: str) -> bool:
    """Whether `at_once` marks this method."""
    return hasattr(getattr(cls, method, None), AT_ONCE)


def _mark(function: F, finish: str) -> F:
    streaming = inspect.isgeneratorfunction(function)
    setattr(function, MARK, Stage(finish=finish, streaming=streaming))
    return function


def stages(cls: type) -> dict[str, Stage]:
    """The stages of a worker class, by method name; `finish` methods are checked to exist."""
    found = {}
    for name, function in _functions(cls):
        mark: Stage | None = getattr(function, MARK, None)
        if mark is None:
            continue
        if mark.finish and not callable(getattr(cls, mark.finish, None)):
            raise TypeError(
                f"{cls.__name__}.{name} names {mark.finish!r} to finish: no such method"
            )
        found[name] = mark
    return found


def holds_state(cls: type) -> bool:
    """Whether a death loses what only a checkpoint can bring back (`rlinf.workers.recovery`)."""
    return hasattr(cls, "restore") or any(mark.finish for mark in stages(cls).values())


def public_methods(cls: type) -> tuple[str, ...]:
    """Methods which a group can call: public ones, except hooks that only the framework calls."""
    return tuple(sorted(name for name, _ in _functions(cls) if name not in HOOKS))


def _functions(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function
