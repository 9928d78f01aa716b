"""Prompts, demonstrations and the verdict on an episode.

Demonstrations are of mixed quality, so that imitation alone stays mediocre and reward has something
to choose from: some search and read, the others answer at once, with a guess. In most of them the
names are exchanged for those of other places, in the question as in what was found: what there is
to learn is reading, not remembering.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from questions import Hop, Question, place_names, questions

from rlinf.workers.bounds import Count, Share
from rlinf.workers.engines.episode_reward import EpisodeReward
from rlinf.workers.episodes.codec import TextCodec
from rlinf.workers.episodes.episode import Language
from rlinf.workers.episodes.turn_format import TurnFormat
from rlinf.workers.roles import GenerationRequest, Sampling
from rlinf.workers.tools.documents import Hit, Shown, shown

__all__ = ["Demonstration", "QuestionConfig", "SearchTask", "language_of", "tiny_codec"]

Ids = npt.NDArray[np.int32]
Parts = list[tuple[str, bool]]
"""Texts, and whether the model writes them."""
CONTROL = ("<pad>", "<end>")
NAMED = 40
"""So often a name is shown to the tokenizer, which makes most of them a token."""


@dataclass(frozen=True, slots=True)
class QuestionConfig:
    """Which questions, and how demonstrations are made.

    Attributes:
        search_share: Of the demonstrations, so many search before they answer.
        exchanged_share: Of the demonstrations, so many have the names of other places.
        held_out: Questions in an evaluation, at most.
        format_reward: For a well-formed answer that is wrong.
    """

    search_share: Share = 0.5
    exchanged_share: Share = 0.8
    held_out: Count = 64
    format_reward: Share = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """A prompt, a response, and which of its tokens the model is to write, bool [T]."""

    prompt: Ids
    response: Ids
    written: npt.NDArray[np.bool_]


def turn_format() -> TurnFormat:
    """The tags of this app."""
    return TurnFormat(["search"])


def tiny_codec(size: int) -> TextCodec:
    """A tokenizer for the articles that the questions are about; tags are tokens of their own."""
    asked = questions()
    texts = [hop.document.text for question in asked for hop in question.hops]
    said = [f" {name}?" for name in place_names()]
    phrases = [f"{question.text} Doc 1(Title:" for question in asked]
    return TextCodec.trained(
        [*dict.fromkeys(texts), *said * NAMED, *phrases], size, [*CONTROL, *turn_format().tags]
    )


def language_of(codec: TextCodec) -> Language:
    """How turns are read with this tokenizer."""
    return Language(codec, turn_format())


class SearchTask:
    """Requests for rollouts, demonstrations for supervised steps, and the reward of episodes."""

    def __init__(
        self,
        config: QuestionConfig,
        codec: TextCodec,
        prompt: Callable[[str], list[int]],
        snippet: Shown,
    ) -> None:
        self.config, self.language, self._codec = config, language_of(codec), codec
        self._prompt, self._snippet = prompt, snippet
        self.items = questions()
        numbers = range(len(self.items))
        self.train = [i for i in numbers if not self.items[i].held_out]
        held_out = [i for i in numbers if self.items[i].held_out]
        self.held_out = random.Random(0).sample(held_out, len(held_out))[: config.held_out]

    def prompts(self, seed: int, count: int) -> list[int]:
        """Indexes of `count` training questions, drawn with replacement."""
        return random.Random(seed).choices(self.train, k=count)

    def requests(
        self, label: str, items: Sequence[int], sampling: Sampling, n: int, max_new_tokens: int
    ) -> list[GenerationRequest]:
        """One request for each question; `label` makes their uids unique in the run."""
        return [
            GenerationRequest(
                uid=f"{label}.{place}",
                prompt_ids=np.array(self._prompt(self.items[item].text), np.int32),
                n=n,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                item=item,
            )
            for place, item in enumerate(items)
        ]

    def reward(self) -> EpisodeReward:
        """Judges episodes by their answers."""
        answers = {i: question.answers for i, question in enumerate(self.items)}
        return EpisodeReward(self.language, answers, self.config.format_reward)

    def demonstrations(self, seed: int, batch: int) -> Iterator[list[Demonstration]]:
        """Endless batches made from training questions, one hop as often as two.

        Of those whose answer can be read in what is shown.
        """
        rng = random.Random(seed)
        usable = [q for q in (self.items[i] for i in self.train) if self._readable(q)]
        kinds = [[q for q in usable if len(q.hops) == n] for n in (1, 2)]
        while True:
            yield [self._demonstration(rng, rng.choice(rng.choice(kinds))) for _ in range(batch)]

    def _demonstration(self, rng: random.Random, question: Question) -> Demonstration:
        if rng.random() < self.config.search_share:
            parts = self._searching(question)
        else:
            parts = [(self._answer(rng.choice(place_names())), True)]
        names = dict.fromkeys(question.about, "")
        if rng.random() < self.config.exchanged_share:
            names = {name: rng.choice(place_names()) for name in names}
        else:
            names = {name: name for name in names}
        response: list[int] = []
        written: list[bool] = []
        for text, ours in parts:
            ids = self._codec.encode(exchanged(text, names))
            response += ids
            written += [ours] * len(ids)
        prompt = self._prompt(exchanged(question.text, names))
        return Demonstration(
            np.array(prompt, np.int32), np.array(response, np.int32), np.array(written, bool)
        )

    def _shown(self, hop: Hop) -> str:
        return shown(hop.query, [Hit(hop.document, 1.0)], self._snippet)

    def _readable(self, question: Question) -> bool:
        return all(hop.gives in self._shown(hop) for hop in question.hops)

    def _searching(self, question: Question) -> Parts:
        turns = self.language.turns
        parts: Parts = []
        for hop in question.hops:
            parts.append((f"<search> {hop.query}</search>", True))
            parts.append((f"{turns.opening}{self._shown(hop)}{turns.closing}", False))
        return [*parts, (self._answer(question.answers[0]), True)]

    def _answer(self, text: str) -> str:
        return f"<answer> {text}</answer>"


def exchanged(text: str, names: dict[str, str]) -> str:
    """The text with each name replaced; a longer name before one that is a part of it."""
    ordered = sorted(names, key=len, reverse=True)
    for place, name in enumerate(ordered):
        text = text.replace(name, f"\0{place}\0")
    for place, name in enumerate(ordered):
        text = text.replace(f"\0{place}\0", names[name])
    return text
