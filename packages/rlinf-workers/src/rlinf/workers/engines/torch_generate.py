"""The embedded rollout engine: its own decode loop over any transformers causal LM."""

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.workers.engines.backbone import backbone_of
from rlinf.workers.engines.flight import Flight, Indexes, Results
from rlinf.workers.engines.generate_config import GenerateConfig
from rlinf.workers.engines.models import ModelSpec, build_model, load_tokenizer
from rlinf.workers.engines.parameters import Served
from rlinf.workers.engines.sampling import draw, uniforms
from rlinf.workers.engines.stop_strings import StopStrings
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.rollout import GenerationRequest, Group, Sampling

__all__ = ["GenerateConfig", "TorchGenerate", "make"]


def make(model: ModelSpec, config: GenerateConfig) -> "TorchGenerate":
    """The engine for a model, whose weights are yet to be loaded; it knows its tokenizer."""
    tokenizer = functools.cache(functools.partial(load_tokenizer, model))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer().decode(ids))

    has_text = model.name != "tiny"
    return TorchGenerate(build_model(model, weights=False), config, decode if has_text else None)


class TorchGenerate(Served):
    """A `RolloutEngine` on one device. Not thread-safe.

    Each prompt is read once and its cache repeated for its samples. Rows that have ended leave the
    batch when that pays, and waiting requests take their place. `model` may be shared with a
    trainer: it is read afresh at every step, and never written except by `load_state`. What that
    loads serves from the next token on: samples in flight keep their keys and values, and their
    groups say which token was drawn with which weights.

    Args:
        model: A causal LM of transformers.
        config: Its limits.
        decode: Text of token ids, special tokens included; needed for stop strings.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GenerateConfig | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._model = model
        self._text_of = decode
        self._aborts: list[frozenset[str] | None] = []
        self._backbone = backbone_of(model)
        self._config = config or GenerateConfig()
        self._device = next(model.parameters()).device

    @property
    def model(self) -> nn.Module:
        """The module it samples from."""
        return self._model

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Group]:
        """Yield one group a request as each completes; see `bursts`."""
        for groups in self.bursts(requests):
            yield from groups

    def bursts(self, requests: Iterable[GenerationRequest]) -> Iterator[list[Group]]:
        """Yield the groups that complete with the same token together.

        Requests with equal `sampling` are decoded together, others one kind after the other.
        """
        kinds: dict[Sampling, list[GenerationRequest]] = {}
        self._aborts = []
        for request in requests:
            kinds.setdefault(request.sampling, []).append(request)
        for sampling, alike in kinds.items():
            yield from filter(None, self._generate(alike, sampling))

    def abort(self, uids: Collection[str] | None = None) -> None:
        """See `RolloutEngine`."""
        self._aborts = [*self._aborts, None if uids is None else frozenset(uids)]

    def _generate(
        self, requests: list[GenerationRequest], sampling: Sampling
    ) -> Iterator[list[Group]]:
        results = Results(requests)
        waiting = deque(range(len(requests)))
        flight: Flight | None = None
        stops = self._stop_strings(sampling)
        known: list[frozenset[str] | None] = []
        while waiting or flight is not None:
            if known is not self._aborts:
                known = self._aborts
                yield list(self._cut(results, waiting, flight))
                flight = self._compacted(flight, bool(waiting))
                continue
            chosen = self._admitted(requests, waiting, flight)
            if chosen:
                joined, groups = self._begin(results, chosen, stops)
                yield groups
                flight = _together(flight, joined)
            elif flight is not None:
                yield self._step(results, flight, stops)
            flight = self._compacted(flight, bool(waiting))

    def _admitted(
        self, requests: list[GenerationRequest], waiting: deque[int], flight: Flight | None
    ) -> list[int]:
        """Take those waiting requests that fit beside the rows in flight.

        Joining copies the cache, so it waits for a quarter of the rows to be free.
        """
        config = self._config
        rows = 0 if flight is None else flight.rows
        if rows and (not self._backbone.can_join or rows > 0.75 * config.max_rows):
            return []
        width = 0 if flight is None else int(flight.widths.max())
        chosen: list[int] = []
        prompt_tokens = 0
        while waiting:
            request = requests[waiting[0]]
            size = len(request.prompt_ids)
            rows += request.n
            width = max(width, size + request.max_new_tokens)
            begun = request.begun
            prompt_tokens += size if begun is None else size * begun.n + int(begun.lengths.sum())
            memory = rows * width * self._backbone.bytes_per_token
            crowded = rows > config.max_rows or memory > config.cache_bytes
            if (crowded or prompt_tokens > config.prefill_tokens) and (chosen or flight):
                break
            chosen.append(waiting.popleft())
        return chosen

    def _stop_strings(self, sampling: Sampling) -> StopStrings | None:
        if not sampling.stop_strings:
            return None
        if self._text_of is None:
            raise ConfigError(
                f"stop strings {sampling.stop_strings} need a tokenizer, and this model has none: "
                "use stop_ids"
            )
        return StopStrings(sampling.stop_strings, self._text_of)

    def _cut(self, results: Results, waiting: deque[int], flight: Flight | None) -> Iterator[Group]:
        """End what was aborted."""

        def doomed(number: int) -> bool:
            uid = results.requests[number].uid
            return any(uids is None or uid in uids for uids in self._aborts)

        for number in filter(doomed, list(waiting)):
            waiting.remove(number)
            results.open(number, self._version)
            yield results.group(number)
        if flight is not None:
            owners = results.owner[flight.slots]
            for number in filter(doomed, np.unique(owners[flight.alive])):
                flight.alive &= owners != number
                yield results.group(number)

    @torch.inference_mode()
    def _begin(
        self, results: Results, chosen: list[int], stops: StopStrings | None
    ) -> tuple[Flight | None, list[Group]]:
        """Read prompts and draw the first token of each of their samples."""
        openings = [results.open(number, self._version) for number in chosen]
        groups = [
            results.group(number)
            for number, opening in zip(chosen, openings, strict=True)
            if not len(opening.slots)
        ]
        sequences = [sequence for opening in openings for sequence in opening.sequences]
        if not sequences:
            return None, groups
        logits, cache = self._backbone.prefill(sequences)
        starts = np.cumsum([0, *(len(opening.sequences) for opening in openings)])
        repeats = np.concatenate([o.source + s for o, s in zip(openings, starts, strict=False)])
        index = torch.from_numpy(repeats).to(self._device)
        steps = max(results.requests[number].max_new_tokens for number in chosen) - 1
        flight = Flight.of(results, openings, cache.select(index, steps))
        return flight, groups + list(self._record(results, flight, logits[index], stops))

    @torch.inference_mode()
    def _step(self, results: Results, flight: Flight, stops: StopStrings | None) -> list[Group]:
        """Draw the next token of each row."""
        logits = self._backbone.decode(flight.tokens, flight.cache)
        return list(self._record(results, flight, logits, stops))

    def _record(
        self, results: Results, flight: Flight, logits: Tensor, stops: StopStrings | None
    ) -> Iterator[Group]:
        sampling = results.requests[0].sampling
        random = torch.from_numpy(uniforms(flight.random, flight.counts)).to(self._device)
        flight.tokens, logprobs = draw(logits, sampling, random)
        tokens = flight.tokens.cpu().numpy()
        alive = np.flatnonzero(flight.alive)
        if len(alive) < flight.rows:
            tokens, logprobs = tokens[alive], logprobs[torch.from_numpy(alive).to(logprobs.device)]
        at, slots = flight.counts[alive], flight.slots[alive]
        results.write(slots, at, tokens, logprobs, self._version)
        flight.counts[alive] = at + 1
        stopped = np.isin(tokens, np.array(sampling.stop_ids, np.int64))
        if stops is not None:
            stopped |= [stops.completed(results.response(slot)) for slot in slots]
        done = stopped | (at + 1 >= flight.limits[alive])
        flight.alive[alive[done]] = False
        if done.any():
            yield from results.close(slots[done], stopped[done])

    def _compacted(self, flight: Flight | None, others_wait: bool) -> Flight | None:
        """Drop dead rows where the copy costs less than they would; fill up to `min_rows`."""
        if flight is None or not flight.alive.any():
            return None
        alive = np.flatnonzero(flight.alive)
        dead = flight.rows - len(alive)
        pays = dead * flight.remaining >= 2 * len(alive)
        pays = pays or (others_wait and 4 * dead >= flight.rows)
        if flight.rows > self._config.min_rows and not (dead and pays):
            return flight
        if flight.rows == max(len(alive), self._config.min_rows):
            return flight
        missing = max(0, self._config.min_rows - len(alive))
        rows = np.concatenate([alive, np.full(missing, alive[0])])
        kept = flight.select(rows, torch.from_numpy(rows).to(self._device))
        kept.alive[len(alive) :] = False
        return kept


def _together(flight: Flight | None, joined: Flight | None) -> Flight | None:
    """The rows in flight, then those that begin now."""
    if flight is None or joined is None:
        return joined if flight is None else flight

    def both(a: Indexes, b: Indexes) -> Indexes:
        return np.concatenate([a, b])

    return Flight(
        flight.cache.join(joined.cache),
        torch.cat([flight.tokens, joined.tokens]),
        both(flight.slots, joined.slots),
        both(flight.counts, joined.counts),
        both(flight.limits, joined.limits),
        both(flight.widths, joined.widths),
        np.concatenate([flight.random, joined.random]),
        np.concatenate([flight.alive, joined.alive]),
    )
