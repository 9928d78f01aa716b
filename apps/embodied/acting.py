"""Who has the environments, and who acts in them: the same worker, or another one."""

from typing import Any

from settings import EmbodiedConfig

from rlinf.channel import Channel
from rlinf.comm import Handle
from rlinf.workers import Cluster
from rlinf.workers.roles.simulator import Spaces
from rlinf.workers.simulation_hosts import ActorWorker, SimulatorWorker, SteppedSimulatorWorker

__all__ = ["Acting"]


class Acting:
    """Collects trajectories by the weights of `trainer/0`. Its workers are started here."""

    def __init__(self, cluster: Cluster, config: EmbodiedConfig, spaces: Spaces) -> None:
        self._cluster, self._config = cluster, config
        world, settings, make = config.env.world, config.simulator_config(), config.make_policy
        if config.acting == "inside":
            self._simulator = self._actor = SimulatorWorker.group(
                cluster, world, settings, make, "trainer/0", spaces, name="simulator"
            ).launch()
        else:
            self._actor = ActorWorker.group(
                cluster, spaces, make, "trainer/0", name="policy"
            ).launch()
            [outline] = self._actor.outline().result(None)
            self._simulator = SteppedSimulatorWorker.group(
                cluster, world, settings, outline, spaces, name="simulator"
            ).launch()
        [self._lanes] = self._simulator.lanes().result(None)

    def load_weights(self, version: int) -> Handle[Any]:
        """Act by these from the next iteration that is begun."""
        return self._actor.load_weights(version)

    def begin(self, step: int) -> tuple[list[Handle[Any]], Channel]:
        """Have the trajectories of an iteration collected: (calls, where they come out)."""
        requests, trajectories = self._cluster.channels(step, "requests", "trajectories")
        requests.put_many(self._config.requests(step, self._lanes))
        requests.close()
        if self._actor is self._simulator:
            return [self._simulator.collect(requests, trajectories)], trajectories
        ring = self._cluster.ring(step, "shown", "decided")
        calls = [self._simulator.step(requests, trajectories, ring), self._actor.act(*ring)]
        return calls, trajectories
