"""Workers of episodes: one that hosts a tool, and a rollout that calls such workers.

    tool     calls -> answers      over "tool" calls of comm, beside the channels
    rollout  requests -> groups    of episodes, streamed in the order in which they complete

A tool is host-only and may die as often as it likes: it is started again, and calls that met
nobody count as failed once their deadline has passed.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf.comm import CommError, Endpoint, Request
from rlinf.workers.hosts import RolloutWorker
from rlinf.workers.roles.tool import Tool, ToolFailed
from rlinf.workers.tools.box import ToolBox, ToolConfig, ToolStatistics
from rlinf.workers.worker import Worker

if TYPE_CHECKING:
    from rlinf.workers.engines.episode_config import EpisodeConfig
    from rlinf.workers.engines.model_spec import ModelSpec
    from rlinf.workers.episodes.episode import Language

__all__ = ["EpisodeWorker", "RemoteTool", "ToolAccess", "ToolWorker"]

log = logging.getLogger(__name__)

SERVICE = "tool"


@dataclass(frozen=True, slots=True)
class _Asked:
    arguments: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Answered:
    answers: tuple[str, ...] = ()
    failure: str = ""
    final: bool = False


class ToolWorker(Worker):
    """Hosts the tool that `make()` gives, called where the worker runs.

    Args:
        make: Makes it.
        threads: Calls under way at the same time; beyond them it is busy, and says so. One that
            never returns keeps its place until the worker ends.
    """

    host_only = True
    restarts = 1_000_000

    def __init__(self, make: Callable[[], Tool], threads: int = 8) -> None:
        self._tool = make()
        self._places = threading.Semaphore(threads)
        self.endpoint.serve(SERVICE, self._take)

    def _take(self, request: Request) -> None:
        if self._places.acquire(blocking=False):
            threading.Thread(target=self._carry_out, args=[request], daemon=True).start()
        else:
            request.reply(_Answered(failure=f"{self.id} is busy with calls that do not end"))

    def _carry_out(self, request: Request) -> None:
        asked: _Asked = request.payload
        try:
            answers = self._tool.call(asked.arguments, asked.timeout_s)
            request.reply(_Answered(tuple(answers)))
        except ToolFailed as error:
            request.reply(_Answered(failure=error.message, final=bool(error.final)))
        except Exception as error:
            log.warning("%s has a defect", self.id, exc_info=True)
            if not request.answered():
                request.reply(_Answered(failure=f"{type(error).__name__}: {error}", final=True))
        finally:
            self._places.release()


class RemoteTool:
    """A `Tool` that a `ToolWorker` hosts."""

    def __init__(self, endpoint: Endpoint, worker: str) -> None:
        self._endpoint, self._worker = endpoint, worker

    def call(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """See `Tool`."""
        asked = _Asked(tuple(arguments), timeout_s)
        try:
            handle = self._endpoint.call(SERVICE, asked, to=self._worker, timeout=timeout_s)
            answered: _Answered = handle.result(timeout_s)
        except CommError as error:
            raise ToolFailed(
                f"{self._worker} cannot be reached ({type(error).__name__})"
            ) from error
        if answered.failure:
            raise ToolFailed(answered.failure, final=answered.final)
        return list(answered.answers)


@dataclass(frozen=True, slots=True)
class ToolAccess:
    """Which tools a rollout calls, and how.

    Attributes:
        workers: The `ToolWorker` of each tool, by its name in the format.
        config: Deadline, tries and so on.
    """

    workers: Mapping[str, str]
    config: ToolConfig


class EpisodeWorker(RolloutWorker):
    """A `RolloutWorker` whose samples are episodes with tools.

    Args:
        model: See `RolloutWorker`.
        config: See `EpisodeConfig`.
        trainer: See `RolloutWorker`.
        make_language: Makes the format and its tokenizer, where the worker runs.
        tools: Who is called.
    """

    def __init__(
        self,
        model: "ModelSpec",
        config: "EpisodeConfig",
        trainer: str,
        make_language: Callable[[], "Language"],
        tools: ToolAccess,
    ) -> None:
        from rlinf.workers.engines.models import build_model
        from rlinf.workers.engines.torch_episodes import TorchEpisodes

        remote = {name: RemoteTool(self.endpoint, to) for name, to in tools.workers.items()}
        self._tools = ToolBox(remote, tools.config)
        engine = TorchEpisodes(
            build_model(model, weights=False), config, make_language(), self._tools
        )
        self._episodes = engine
        self._serve(engine, trainer)

    def tool_statistics(self) -> ToolStatistics:
        """What became of all calls so far."""
        return self._tools.statistics()

    def idle_s(self) -> float:
        """See `Worker`: the time in which all episodes waited for tools."""
        return self._episodes.idle_s

    def close(self) -> None:
        """See `Worker`."""
        self._tools.close()
