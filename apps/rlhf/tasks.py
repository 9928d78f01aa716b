"""The verifiable tasks of this app: prompts, demonstrations and the verdict on a response.

Both come from reasoning-gym, whose `score_answer` gives the verdict: 1.0 for a right answer that
ended where it should, 0.0 for everything else. Items are split into training and held-out ones by
a hash of the prompt, so that no held-out prompt is ever trained on.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from rlinf.workers.bounds import Bounds, Count, Share
from rlinf.workers.engines.rule_reward import RuleReward, judge_reasoning_gym
from rlinf.workers.roles import GenerationRequest, Sampling

__all__ = ["CharTokenizer", "PretrainedTokenizer", "Task", "TaskConfig", "Tokenizer"]

Ids = npt.NDArray[np.int32]
Pair = tuple[Ids, Ids]
Entry = dict[str, Any]
HELD_OUT_BELOW = 51
"""A prompt is held out where the first byte of its hash is below this: one in five."""


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Which task, and how its data is made.

    Attributes:
        name: number_sorting: four digits, ascending or descending. chain_sum: one-digit sums.
        size: Items to draw from reasoning-gym, before repeated ones are dropped.
        data_seed: Of that draw; the split is the same for every run with the same one.
        right_share: Of the demonstrations, so many are right; the others are wrong in a regular
            way, so that imitation alone stays mediocre and reward has something to choose from.
        held_out: Held-out prompts in an evaluation, at most.
    """

    name: Literal["number_sorting", "chain_sum"] = "number_sorting"
    size: Annotated[int, Bounds(64)] = 8000
    data_seed: int = 1
    right_share: Share = 0.5
    held_out: Count = 128


class Tokenizer(Protocol):
    """What a task needs to turn text into token ids and back."""

    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, stop tokens included."""


class CharTokenizer:
    """One token a character of `0123456789+-=><ab`, and pad, begin and end."""

    CHARACTERS = "0123456789+-=><ab"
    PAD, BEGIN, END = range(3)
    size = 3 + len(CHARACTERS)
    stop_ids: tuple[int, ...] = (END,)
    banned_ids: tuple[int, ...] = (PAD, BEGIN)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; the end token is written as a newline."""
        return [self.END if c == "\n" else self.CHARACTERS.index(c) + 3 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; the end token becomes a newline, pad and begin vanish."""
        return "".join("\n" if i == self.END else self.CHARACTERS[i - 3] for i in ids if i >= 2)


class PretrainedTokenizer:
    """A transformers tokenizer. A line's end ends a response, as does the model's own end."""

    banned_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.stop_ids: tuple[int, ...] = (self.encode("\n")[-1], tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; the model's own end becomes a newline."""
        ended = [self.stop_ids[0] if i == self.stop_ids[1] else i for i in ids]
        return str(self._tokenizer.decode(ended))


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt, its right answer as a response would say it, and the entry that judges."""

    prompt: str
    answer: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class Kind:
    """What sets one task apart.

    Attributes:
        dataset: Arguments of `reasoning_gym.create_dataset`.
        item: Makes the item of an entry.
        read: The answer in a response, as reasoning-gym wants it; None where there is none.
        wrong: A regularly wrong answer to an item.
    """

    dataset: Mapping[str, object]
    item: Callable[[Entry], Item]
    read: Callable[[str], str | None]
    wrong: Callable[[random.Random, Item], str]


class Task:
    """Prompts for rollouts, pairs for supervised steps, and the reward of responses."""

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer) -> None:
        import reasoning_gym

        kind = KINDS[config.name]
        self.config, self.tokenizer, self._kind = config, tokenizer, kind
        self._dataset = reasoning_gym.create_dataset(
            config.name, size=config.size, seed=config.data_seed, **kind.dataset
        )
        self.items = tuple({i.prompt: i for i in map(kind.item, self._dataset)}.values())
        held_out = [_is_held_out(item.prompt) for item in self.items]
        self.train = [i for i, held in enumerate(held_out) if not held]
        self.held_out = [i for i, held in enumerate(held_out) if held][: config.held_out]

    def prompts(self, seed: int, count: int) -> list[int]:
        """Indexes of `count` training items, drawn with replacement."""
        return random.Random(seed).choices(self.train, k=count)

    def requests(
        self, label: str, items: Sequence[int], sampling: Sampling, n: int, max_new_tokens: int
    ) -> list[GenerationRequest]:
        """One request for each item; `label` makes their uids unique in the run."""
        return [
            GenerationRequest(
                uid=f"{label}.{place}",
                prompt_ids=self._ids(self.items[item].prompt),
                n=n,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                item=item,
            )
            for place, item in enumerate(items)
        ]

    def demonstrations(self, seed: int, batch: int) -> Iterator[list[Pair]]:
        """Endless batches of (prompt ids, response ids) made from training items."""
        rng = random.Random(seed)
        while True:
            yield [self._demonstration(rng) for _ in range(batch)]

    def reward(self) -> RuleReward:
        """Judges responses: 1.0 where one is right and ended by itself, else 0.0."""
        entries = {i: item.entry for i, item in enumerate(self.items)}
        judge = judge_reasoning_gym(self._dataset, entries, self._kind.read)
        return RuleReward(self.tokenizer.decode, judge)

    def _demonstration(self, rng: random.Random) -> Pair:
        item = self.items[rng.choice(self.train)]
        right = rng.random() < self.config.right_share
        answer = item.answer if right else self._kind.wrong(rng, item)
        return self._ids(item.prompt), self._ids(answer + "\n", prompt=False)

    def _ids(self, text: str, prompt: bool = True) -> Ids:
        ids = self.tokenizer.encode(text)
        begins = prompt and isinstance(self.tokenizer, CharTokenizer)
        return np.array([CharTokenizer.BEGIN, *ids] if begins else ids, np.int32)


def _is_held_out(prompt: str) -> bool:
    return hashlib.md5(prompt.encode(), usedforsecurity=False).digest()[0] < HELD_OUT_BELOW


def _digits(numbers: Sequence[str]) -> str:
    return "".join(str(int(float(number))) for number in numbers)


def _sorting_item(entry: Entry) -> Item:
    facts = entry["metadata"]
    sign = "<" if facts["direction"] == "ascending" else ">"
    prompt = f"{sign}{_digits(facts['original_numbers'])}="
    return Item(prompt, _digits(facts["sorted_numbers"]), entry)


def _read_sorted(response: str) -> str | None:
    digits = response.removesuffix("\n")
    ended = response.endswith("\n") and digits.isascii() and digits.isdigit()
    return str([int(digit) for digit in digits]) if ended else None


def _wrongly_sorted(rng: random.Random, item: Item) -> str:
    given = item.prompt[1:-1]
    return rng.choice([item.answer[::-1], given, given[::-1]])


def _sum_item(entry: Entry) -> Item:
    expression = entry["metadata"]["expression"]
    return Item(f"2 + 3 = 5\n9 - 4 = 5\n{expression} =", f" {entry['answer']}", entry)


def _read_sum(response: str) -> str | None:
    found = re.fullmatch(r"\s*(-?\d+)\n", response)
    return found[1] if found else None


def _wrong_sum(rng: random.Random, item: Item) -> str:
    return f" {int(item.answer) + rng.choice([-2, -1, 1, 2])}"


KINDS = {
    "number_sorting": Kind(
        dataset={
            "min_numbers": 4,
            "max_numbers": 4,
            "min_decimals": 0,
            "max_decimals": 0,
            "min_value": 0,
            "max_value": 9,
        },
        item=_sorting_item,
        read=_read_sorted,
        wrong=_wrongly_sorted,
    ),
    "chain_sum": Kind(
        dataset={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        item=_sum_item,
        read=_read_sum,
        wrong=_wrong_sum,
    ),
}
