"""Reads what a model wants out of a turn that it wrote. Pure functions of text.

    <think>...</think>    nothing in it counts
    <search>...</search>  a call of the tool `search`; so for every tool
    <answer>...</answer>  the end
    <information>...</information>  put around what a tool answered

Only a turn's own text is ever read, never what a tool answered: whatever tags that has, it cannot
act. Tags are lower case, without attributes; anything else is text, and so is an `<information>`
that the model writes itself. A turn ends with the first closing tag of an action, and what was
meant to follow is not written any more.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["Action", "Answer", "Call", "Invalid", "TurnFormat"]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool is to be called."""

    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The episode is over."""

    text: str


@dataclass(frozen=True, slots=True)
class Invalid:
    """Something that cannot be done.

    Attributes:
        reason: For the model to read.
        final: It was meant as an answer: the episode is over.
    """

    reason: str
    final: bool = False


Action = Call | Answer | Invalid


class TurnFormat:
    """The tags of a run.

    Args:
        tools: Names of the tools; each is a tag.
        answer: Tag of an answer.
        think: Tag of thoughts.
        information: Tag around what a tool answered.

    Raises:
        ValueError: A tag stands for two things, or cannot be a tag.
    """

    def __init__(
        self,
        tools: Collection[str],
        *,
        answer: str = "answer",
        think: str = "think",
        information: str = "information",
    ) -> None:
        names = [*tools, answer, think, information]
        if len(set(names)) < len(names) or not all(re.fullmatch(r"[a-z_]+", n) for n in names):
            raise ValueError(f"tags must be different words in lower case, not {names}")
        self.tools, self.answer, self.think = tuple(tools), answer, think
        self.information = information
        self._tag = re.compile(rf"<(/?)({'|'.join([*tools, answer, think])})>")

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag as it is written, for a vocabulary."""
        names = [self.think, *self.tools, self.information, self.answer]
        return tuple(f"<{slash}{name}>" for name in names for slash in ("", "/"))

    @property
    def opening(self) -> str:
        """What stands before a tool's answer."""
        return f"<{self.information}>"

    @property
    def closing(self) -> str:
        """What stands after it."""
        return f"</{self.information}>"

    def read(self, turn: str) -> Action | None:
        """The action that ends this turn; None where none is complete yet.

        An action with another tag in it is invalid, and so is an empty one: nothing is called.
        """
        thinking, begun, name, nested = False, -1, "", False
        for found in self._tag.finditer(turn):
            closes, tag = found[1] == "/", found[2]
            if thinking:
                thinking = not (closes and tag == self.think)
            elif not name:
                if not closes:
                    thinking = tag == self.think
                    begun, name = found.end(), "" if thinking else tag
            elif closes and tag != self.think:
                nested = nested or tag != name
                return self._action(name, turn[begun : found.start()].strip(), nested)
            else:
                nested = True
        return None

    def _action(self, name: str, text: str, nested: bool) -> Action:
        final = name == self.answer
        if nested:
            return Invalid(f"<{name}> must not have other tags in it", final)
        if not text:
            return Invalid(f"<{name}> must not be empty", final)
        return Answer(text) if final else Call(name, text)
