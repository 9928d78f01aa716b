"""What the configurations of all programs have in common."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlinf.comm import CommConfig
from rlinf.workers.bounds import Count, Natural
from rlinf.workers.checkpoint import CheckpointConfig
from rlinf.workers.cluster import Cluster, ClusterConfig
from rlinf.workers.course import Choice, PlanningConfig

__all__ = ["RunConfig"]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A program's own configuration inherits from this and adds its keys.

    Attributes:
        launcher: ray: a process a worker; inline: all in this process.
        plan: temporal, spatial, auto, or the path of a saved plan.
        steps: How many; a step ends with an update of the policy.
        seed: Of weights, data and everything that is drawn.
        folder: Where the run is written; runs/<program>/<time> by default.
        resume: true: go on with the run in `folder`, or else with the newest one; or the path of a
            run folder, or of one checkpoint.
        checkpoint: When checkpoints are written into the folder.
    """

    launcher: Literal["ray", "inline"] = "ray"
    plan: str = "temporal"
    steps: Count = 60
    seed: Natural = 0
    folder: Path | None = None
    resume: bool | Path = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    scheduling: PlanningConfig = field(default_factory=PlanningConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    communication: CommConfig = field(default_factory=CommConfig)

    def __post_init__(self) -> None:
        Choice.of(self.plan)

    def open_cluster(self, folder: Path) -> Cluster:
        """The job, which writes its run into `folder`. Errors: see `Cluster`."""
        return Cluster(self.cluster, self.launcher, comm=self.communication, folder=folder)
