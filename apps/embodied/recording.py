"""Episodes of the policy as moving pictures, drawn beside the training."""

from typing import Any

from settings import EmbodiedConfig

from rlinf.comm import Handle
from rlinf.workers import Cluster, WorkerError, WorkerGroup
from rlinf.workers.roles.simulator import Spaces
from rlinf.workers.run import Run
from rlinf.workers.simulation_hosts import RendererWorker

__all__ = ["Films"]


class Films:
    """Writes `episode.gif` into the run's folder at the end, and `episode_<step>.gif` before.

    The renderer is a worker of its own, started when the first film is due. The training does not
    wait for it; where nothing can be drawn, or it dies over a film, the run says why and goes on.
    """

    def __init__(self, cluster: Cluster, config: EmbodiedConfig, spaces: Spaces, run: Run) -> None:
        self._cluster, self._config, self._spaces, self._run = cluster, config, spaces, run
        self._renderer: WorkerGroup | None = None
        self._asked: Handle[list[Any]] | None = None
        self._name = ""

    def draw(self, step: int) -> None:
        """Begin a film where one is due, unless another one is still being made."""
        every = self._config.film.every
        if self._asked is not None and self._asked.done():
            self._write()
        if every and step % every == 0 and self._asked is None:
            self._ask(f"episode_{step}.gif")

    def finish(self) -> None:
        """The film of the end; returns when it is there, or cannot be had."""
        if self._asked is not None:
            self._write()
        if self._config.film.steps:
            self._ask("episode.gif")
            self._write()

    def _ask(self, name: str) -> None:
        config, film = self._config, self._config.film
        if self._renderer is None:
            self._renderer = RendererWorker.group(
                self._cluster, self._spaces, config.make_policy, "trainer/0", name="renderer"
            ).launch()
        self._name = name
        self._asked = self._renderer.film(
            config.film_spec(), config.seed, film.steps, film.timeout_s
        )

    def _write(self) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None
        try:
            [frames] = asked.result(2 * self._config.film.timeout_s)
        except WorkerError as error:
            self._run.say(f"no {self._name}: {error}")
            return
        from PIL import Image

        first, *others = [Image.fromarray(frame) for frame in frames]
        duration = 1000 // self._config.film.fps
        path = self._run.folder / self._name
        first.save(path, save_all=True, append_images=others, duration=duration, loop=0)
