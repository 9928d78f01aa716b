"""An episode of the trained policy as a moving picture."""

from pathlib import Path

from settings import EmbodiedConfig

from rlinf.workers import WorkerError, WorkerGroup
from rlinf.workers.run import Run

__all__ = ["record_episode"]


def record_episode(simulator: WorkerGroup, config: EmbodiedConfig, run: Run) -> Path | None:
    """Write `episode.gif` into the run's folder; where nothing can be drawn, say why."""
    film = config.film
    if not film.steps:
        return None
    asked = simulator.film(config.film_spec(), config.seed, film.steps, film.timeout_s)
    try:
        [frames] = asked.result(2 * film.timeout_s)
    except WorkerError as error:
        run.say(f"no film: {error}")
        return None
    from PIL import Image

    first, *others = [Image.fromarray(frame) for frame in frames]
    path = run.folder / "episode.gif"
    first.save(path, save_all=True, append_images=others, duration=1000 // film.fps, loop=0)
    return path
