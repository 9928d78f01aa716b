"""Tool: what a model may call in the middle of an episode. Text in, text out.

A tool that cannot answer never ends a run: the model is told so in words, and the call is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from rlinf.workers.errors import WorkerError

__all__ = ["Observation", "Tool", "ToolFailed"]


class ToolFailed(WorkerError):
    """A tool could not carry out a call; it says nothing about what the model asked for.

    Attributes:
        final: Another try cannot help.
    """

    FIELDS = ("final",)
    final: bool | None


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model is shown after a call.

    Attributes:
        text: The tool's answer, or what went wrong.
        status: `ok`: the tool's answer. `failed`: the tool gave none, after all tries or at the
            deadline. `refused`: there was nothing to call it with.
        seconds: From the call to this.
        tries: How often the tool was asked.
    """

    text: str
    status: Literal["ok", "failed", "refused"] = "ok"
    seconds: float = 0.0
    tries: int = 0


@runtime_checkable
class Tool(Protocol):
    """Carries out calls. Called from several threads at once."""

    def call(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """One answer for each argument, in order, in `timeout_s` seconds.

        Raises `ToolFailed` for all of them. An answer about a wrong argument (an error in a
        program, nothing found) is an answer like any other.
        """
