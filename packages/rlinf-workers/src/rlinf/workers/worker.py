"""Worker: a class of which a group runs several instances; `@stage` marks its chunk functions.

    class Scorer(Worker):
        def __init__(self, bonus: float) -> None:
            self.bonus = bonus

        @stage
        def score(self, samples: list[Sample]) -> list[float]:
            return [sample.reward + self.bonus for sample in samples]

The constructor runs where the worker runs, and `self.endpoint`, `self.id`, `self.rank`,
`self.world_size` and `self.context` are there already. Every public method can be called through
the group, on every rank; calls are carried out one after another on the worker's main thread.
"""

from typing import Self

from rlinf.workers.base import Context, WorkerBase
from rlinf.workers.cluster import Cluster
from rlinf.workers.group import Group
from rlinf.workers.stages import Again, stage

__all__ = ["Again", "Context", "Worker", "stage"]


class Worker(WorkerBase):
    """Base of all workers. Subclasses define their own constructor and need not call this one."""

    @classmethod
    def group(
        cls,
        cluster: Cluster,
        *args: object,
        count: int = 1,
        name: str | None = None,
        restarts: int | None = None,
        **kwargs: object,
    ) -> Group[Self]:
        """Describe `count` workers of this class; `.launch(placement)` starts them.

        Args:
            cluster: Where they run.
            args: For the constructor of every rank, with `kwargs`; sent encoded.
            count: Number of ranks, 0 to count - 1.
            name: Name of the group, unique in the cluster; the lower-case class name by default.
            restarts: Overrides `Worker.restarts`.
            kwargs: For the constructor.
        """
        return Group(cluster, cls, args, kwargs).named(name, count, restarts)
