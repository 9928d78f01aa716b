"""Episodes with tools on the embedded engine: turns of many episodes in one decode loop.

A row that waits for a tool stays where it is, with its keys and values, and is decoded on from
there once the answer has been appended: nothing is read twice, and nobody waits for the tools of
others. Answers that come about the same time are read together.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlinf.workers.engines.decoder import Decoder
from rlinf.workers.engines.episode_config import EpisodeConfig
from rlinf.workers.engines.kv_cache import KvCache
from rlinf.workers.engines.sampling import UintArray, draw, streams, uniforms
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.episodes.episode import Episode, Language, group_of
from rlinf.workers.episodes.turn_format import Invalid
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.rollout import GenerationRequest, Group, Sampling
from rlinf.workers.roles.tool import Observation
from rlinf.workers.tools.box import ToolBox

__all__ = ["EpisodeConfig", "TorchEpisodes"]

Indexes = npt.NDArray[np.int64]
PATIENCE_S = 60.0


class TorchEpisodes(TorchGenerate):
    """A `RolloutEngine` whose samples are episodes. Not thread-safe.

    Args:
        model: One that `Decoder` can run.
        config: See `EpisodeConfig`.
        language: How turns are read.
        tools: Who carries out calls; a tool of this name for each of the format.

    Raises:
        ConfigError: The model cannot go on in the middle of a batch, or another engine is wanted.
    """

    def __init__(
        self, model: nn.Module, config: EpisodeConfig, language: Language, tools: ToolBox
    ) -> None:
        if config.engine.name != "torch":
            raise ConfigError(
                f"rollout.engine.name={config.engine.name}: episodes with tools run on torch only"
            )
        super().__init__(model, config.engine)
        if not isinstance(self._backbone, Decoder):
            raise ConfigError(f"episodes need a Llama or Qwen2 model, not {type(model).__name__}")
        self._decoder = self._backbone
        self._limits, self._gather_steps = config.limits, config.gather_steps
        self._language, self._tools = language, tools
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """Seconds so far in which every episode waited for a tool."""
        return self._idle_s

    def _generate(
        self, requests: list[GenerationRequest], sampling: Sampling
    ) -> Iterator[list[Group]]:
        if sampling.stop_strings:
            raise ConfigError("a turn ends where its format says so: stop_strings are not read")
        table = _Table(requests)
        waiting = deque(range(len(requests)))
        try:
            while waiting or table.rows:
                self._admit(table, waiting, sampling)
                yield list(table.complete())
                self._collect(table)
                if table.due(self._gather_steps):
                    self._resume(table, sampling)
                elif table.going.any():
                    self._decode(table, sampling)
                yield list(table.complete())
                self._drop(table, bool(waiting))
        finally:
            for number in table.pending:  # the caller wants no more
                self._tools.forget(number)

    @torch.inference_mode()
    def _admit(self, table: "_Table", waiting: deque[int], sampling: Sampling) -> None:
        """Begin the waiting requests that there is room for."""
        chosen = self._fitting(table, waiting)
        if not chosen:
            return
        requests = [table.requests[i] for i in chosen]
        logits, cache = self._decoder.prefill([r.prompt_ids for r in requests])
        repeats = np.repeat(np.arange(len(requests)), [r.n for r in requests])
        index = torch.from_numpy(repeats).to(self._device)
        own = cache.select(index, 0)
        begun = table.join(own, chosen, self._episodes(requests))
        self._draw(table, begun, logits[index], sampling)

    def _episodes(self, requests: Sequence[GenerationRequest]) -> list[Episode]:
        return [
            Episode(request, sample, self._version, self._limits, self._language)
            for request in requests
            for sample in range(request.n)
        ]

    def _fitting(self, table: "_Table", waiting: deque[int]) -> list[int]:
        config, rows, tokens = self._config, table.rows, 0
        if rows > 0.75 * config.max_rows:
            return []
        chosen: list[int] = []
        while waiting:
            request = table.requests[waiting[0]]
            rows += request.n
            tokens += len(request.prompt_ids)
            memory = rows * self._limits.tokens * self._decoder.bytes_per_token
            crowded = rows > config.max_rows or memory > config.cache_bytes
            if (crowded or tokens > config.prefill_tokens) and (chosen or table.rows):
                break
            chosen.append(waiting.popleft())
        return chosen

    def _collect(self, table: "_Table") -> None:
        """Take what tools answered; wait for it only where there is nothing else to do."""
        if not table.pending:
            return
        idle = not table.going.any() and not table.answered
        begun = time.monotonic()
        for number, observation in self._tools.collect(PATIENCE_S if idle else 0.0):
            table.answer(number, observation)
        if idle:
            self._idle_s += time.monotonic() - begun

    @torch.inference_mode()
    def _resume(self, table: "_Table", sampling: Sampling) -> None:
        """Append the answers that are there to their episodes, which go on."""
        rows, pieces = table.take_answers()
        if rows:
            logits = self._decoder.extend(pieces, rows, table.cache)
            table.going[rows] = True
            self._draw(table, np.array(rows), logits, sampling)

    @torch.inference_mode()
    def _decode(self, table: "_Table", sampling: Sampling) -> None:
        rows = np.flatnonzero(table.going)
        everybody = len(rows) == table.rows
        going = None if everybody else torch.from_numpy(table.going.copy()).to(self._device)
        logits = self._decoder.decode(table.tokens, table.cache, going)
        if not everybody:
            logits = logits[torch.from_numpy(rows).to(self._device)]
        table.steps += 1
        self._draw(table, rows, logits, sampling)

    def _draw(self, table: "_Table", rows: Indexes, logits: Tensor, sampling: Sampling) -> None:
        """Draw a token in each of `rows`, and begin what the episodes then ask for."""
        random = uniforms(table.random[rows], table.drawn[rows])
        drawn, logprobs = draw(logits, sampling, torch.from_numpy(random).to(self._device))
        table.tokens[torch.from_numpy(rows).to(self._device)] = drawn
        table.drawn[rows] += 1
        chosen = zip(rows.tolist(), drawn.tolist(), logprobs.tolist(), strict=True)
        for row, token, logprob in chosen:
            episode = table.episodes[row]
            action = episode.wrote(token, logprob)
            if episode.outcome is not None:
                table.end(row)
            elif isinstance(action, Invalid):
                table.going[row] = False
                table.answered[row] = (table.steps, Observation(action.reason, "refused"))
            elif action is not None:
                table.going[row] = False
                table.pending[self._tools.submit(action.tool, action.argument)] = row

    def _drop(self, table: "_Table", others_wait: bool) -> None:
        """Drop rows that have ended where that pays; fill up to `min_rows` with idle ones."""
        alive = np.flatnonzero(~table.ended)
        if not len(alive):
            table.clear()
            return
        dead, floor = table.rows - len(alive), max(len(alive), self._config.min_rows)
        pays = 2 * dead >= table.rows or (others_wait and 4 * dead >= table.rows)
        if table.rows == floor or (table.rows > floor and not pays):
            return
        idle = np.full(floor - len(alive), alive[0])
        kept = np.concatenate([alive, idle])
        table.select(kept, len(alive), torch.from_numpy(kept).to(self._device))


class _Table:
    """The rows of the cache: whose they are, and what each is doing."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        self.steps = 0
        self.pending: dict[int, int] = {}
        """Call -> row."""
        self.answered: dict[int, tuple[int, Observation]] = {}
        """Row -> the step at which its answer came, and the answer."""
        self._over: dict[int, list[Episode]] = {}
        self._complete: list[Group] = []
        self.clear()

    def clear(self) -> None:
        """No rows."""
        self.cache: KvCache
        self.rows = 0
        self.tokens = torch.zeros(0, dtype=torch.int64)
        self.episodes: list[Episode] = []
        self.owners: list[int] = []
        self.random: UintArray = np.zeros(0, np.uint64)
        self.drawn: Indexes = np.zeros(0, np.int64)
        self.going = np.zeros(0, bool)
        self.ended = np.zeros(0, bool)

    def join(self, cache: KvCache, chosen: Sequence[int], episodes: list[Episode]) -> Indexes:
        """Add rows for the samples of the requests `chosen`; their numbers."""
        begun = np.arange(self.rows, self.rows + len(episodes))
        self.cache = self.cache.join(cache) if self.rows else cache
        self.rows += len(episodes)
        self.episodes += episodes
        requests = [self.requests[i] for i in chosen]
        self.owners += [i for i in chosen for _ in range(self.requests[i].n)]
        random = [streams(r.sampling.seed, r.uid, r.n) for r in requests]
        self.random = np.concatenate([self.random, *random])
        blank = torch.zeros(len(episodes), dtype=torch.int64, device=cache.lengths.device)
        self.tokens = torch.cat([self.tokens.to(blank.device), blank])
        self.drawn = np.concatenate([self.drawn, np.zeros(len(episodes), np.int64)])
        self.going = np.concatenate([self.going, np.ones(len(episodes), bool)])
        self.ended = np.concatenate([self.ended, np.zeros(len(episodes), bool)])
        return begun

    def answer(self, number: int, observation: Observation) -> None:
        """A tool answered."""
        self.answered[self.pending.pop(number)] = (self.steps, observation)

    def due(self, patience: int) -> bool:
        """Whether answers are to be read now rather than after another step."""
        if not self.answered:
            return False
        going = int(self.going.sum())
        oldest = min(step for step, _ in self.answered.values())
        return 4 * len(self.answered) >= going or self.steps - oldest >= patience

    def take_answers(self) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
        """The rows that go on, and the tokens that follow what each has in the cache.

        The last token which a row drew is not in the cache yet.
        """
        rows, pieces = [], []
        for row, (_, observation) in sorted(self.answered.items()):
            episode = self.episodes[row]
            last = episode.ids[-1]
            ids = episode.observed(observation)
            if episode.outcome is not None:
                self.end(row)
            else:
                rows.append(row)
                pieces.append(np.array([last, *ids]))
        self.answered.clear()
        return rows, pieces

    def end(self, row: int) -> None:
        """The episode of this row is over."""
        self.going[row], self.ended[row] = False, True
        owner = self.owners[row]
        over = self._over.setdefault(owner, [])
        over.append(self.episodes[row])
        if len(over) == self.requests[owner].n:
            self._complete.append(group_of(sorted(over, key=lambda e: e.sample)))
            del self._over[owner]

    def complete(self) -> Iterator[Group]:
        """The groups that were completed since the last time."""
        complete, self._complete = self._complete, []
        yield from complete

    def select(self, rows: Indexes, alive: int, on_device: Tensor) -> None:
        """Keep these rows only, in this order; `on_device` holds the same numbers.

        Those after the first `alive` are idle.
        """
        self.cache = self.cache.select(on_device, 0)
        self.tokens = self.tokens[on_device]
        self.rows = len(rows)
        place = {int(old): new for new, old in enumerate(rows[:alive])}
        self.episodes = [self.episodes[i] for i in rows]
        self.owners = [self.owners[i] for i in rows]
        self.random, self.drawn = self.random[rows], self.drawn[rows]
        self.going, self.ended = self.going[rows], np.arange(len(rows)) >= alive
        self.going &= ~self.ended
        self.pending = {number: place[row] for number, row in self.pending.items()}
        self.answered = {place[row]: answer for row, answer in self.answered.items()}
