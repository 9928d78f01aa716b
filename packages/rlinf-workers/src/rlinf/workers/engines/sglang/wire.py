"""What SGLang is asked and what it answers, as plain data. No I/O.

Prompts are always sent as ids and responses read as ids with their log-probs: text is never
tokenised. The log-probs are those of the softmax at the request's temperature, before top-k, top-p
and min-p: the kind `full`. Ids that are banned are given a bias that no logit makes up for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.workers.errors import ConfigError, WorkerError
from rlinf.workers.roles.rollout import (
    FINISH_REASONS,
    FloatArray,
    GenerationRequest,
    Group,
    IntArray,
    Sampling,
)

__all__ = ["Ask", "SglangRefused", "Spoken", "asks_of", "check_done", "group_of", "spoken"]

BANNED_BIAS = -1e9
ABORTED = FINISH_REASONS.index("aborted")


class SglangRefused(WorkerError):
    """SGLang could not be reached, or answered that it did not do what it was asked."""

    FIELDS = ("operation", "server")


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of `generate`, for one sample. What samples share SGLang finds in its cache.

    Attributes:
        request: Number of the request.
        sample: Which of its samples.
        payload: What is sent.
    """

    request: int
    sample: int
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Spoken:
    """What became of a sample: its new tokens, their log-probs and weights, and why it ended."""

    tokens: IntArray
    logprobs: FloatArray
    finish: int
    version: int


def asks_of(requests: Sequence[GenerationRequest]) -> list[Ask]:
    """What to ask for; nothing for samples that have ended."""
    asks: list[Ask] = []
    for number, request in enumerate(requests):
        if request.sampling.logprobs != "full":
            raise ConfigError(
                f"request {request.uid} wants log-probs of the kind {request.sampling.logprobs}; "
                "SGLang records only the kind full"
            )
        begun = request.begun
        for sample in range(request.n):
            ids, left = request.prompt_ids, request.max_new_tokens
            if begun is not None:
                if begun.finish[sample] != ABORTED:
                    continue
                ids = np.concatenate([ids, begun.response(sample)])
                left -= int(begun.lengths[sample])
            payload = {
                "rid": f"{request.uid}#{sample}",
                "input_ids": ids.tolist(),
                "sampling_params": _sampling(request.sampling) | {"max_new_tokens": left},
                "return_logprob": True,
                "stream": False,
            }
            asks.append(Ask(number, sample, payload))
    return asks


def _sampling(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "logit_bias": {str(token): BANNED_BIAS for token in sampling.banned_ids},
    }


def spoken(answer: Mapping[str, Any], version: int) -> Spoken:
    """Read the answer about one sample; `version` counts where it names no weights.

    Raises `SglangRefused` for a sample that was given up for another reason than `abort`.
    """
    about = answer["meta_info"]
    reason = about.get("finish_reason") or {"type": "abort"}
    if reason["type"] == "abort" and int(reason.get("status_code") or 0) >= 400:
        raise SglangRefused(
            f"SGLang gave up request {about.get('id')}: {reason.get('message')}",
            operation="generate",
        )
    drawn = about.get("output_token_logprobs") or []
    known = str(about.get("weight_version", ""))
    return Spoken(
        tokens=np.array([token for _, token, *_ in drawn], np.int32),
        logprobs=np.array([logprob for logprob, *_ in drawn], np.float32),
        finish=FINISH_REASONS.index({"abort": "aborted"}.get(reason["type"], reason["type"])),
        version=int(known) if known.isdigit() else version,
    )


def group_of(request: GenerationRequest, said: Mapping[int, Spoken]) -> Group:
    """The group of a request: what it began with, and what was said, by sample."""
    begun, nothing = request.begun, np.zeros(0, np.int32)
    tokens, logprobs, versions, finish = [], [], [], []
    for sample in range(request.n):
        new = said.get(sample, Spoken(nothing, nothing.astype(np.float32), ABORTED, 0))
        old, old_logprobs, known = nothing, new.logprobs[:0], nothing
        if begun is not None:
            length = begun.lengths[sample]
            old, old_logprobs = begun.response(sample), begun.logprobs[sample, :length]
            drawn = begun.token_versions
            known = np.full(length, begun.versions[sample]) if drawn is None else drawn[sample]
            known = known[:length]
        tokens.append(np.concatenate([old, new.tokens]))
        logprobs.append(np.concatenate([old_logprobs, new.logprobs]))
        versions.append(np.concatenate([known, np.full(len(new.tokens), new.version)]))
        finish.append(new.finish if sample in said else _finish(begun, sample))
    first = [int(row[0]) if len(row) else 0 for row in versions]
    mixed = any((row != row[0]).any() for row in versions if len(row))
    return Group(
        uid=request.uid,
        prompt_ids=np.asarray(request.prompt_ids, np.int32),
        tokens=_padded(tokens, np.int32),
        lengths=np.array([len(row) for row in tokens], np.int32),
        logprobs=_padded(logprobs, np.float32),
        finish=np.array(finish, np.uint8),
        versions=np.array(first, np.int32),
        sampling=request.sampling,
        item=request.item,
        token_versions=_padded(versions, np.int32) if mixed else None,
    )


def _finish(begun: Group | None, sample: int) -> int:
    return ABORTED if begun is None else int(begun.finish[sample])


def _padded(rows: Sequence[Any], kind: Any) -> Any:
    wide = np.zeros((len(rows), max(map(len, rows))), kind)
    for place, row in enumerate(rows):
        wide[place, : len(row)] = row
    return wide


def check_done(answer: Any, operation: str, server: str) -> None:
    """Raise `SglangRefused` if `answer` says that the operation failed.

    It does so as (False, message), or as an object with `success` and `message`; what has neither
    is a plain acknowledgement.
    """
    done, said = True, ""
    if isinstance(answer, (tuple, list)) and answer and isinstance(answer[0], bool):
        done, said = answer[0], str(answer[1]) if len(answer) > 1 else ""
    elif isinstance(answer, Mapping) and "success" in answer:
        done, said = bool(answer["success"]), str(answer.get("message", ""))
    if not done:
        raise SglangRefused(
            f"SGLang at {server} refused {operation}: {said or 'it gives no reason'}",
            operation=operation,
            server=server,
        )
