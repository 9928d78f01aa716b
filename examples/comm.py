import multiprocessing

import numpy as np

from rlinf.comm import Endpoint, RegistryClient, RegistryServer


def rollout(address, token):
    with Endpoint("rollout/0", registry=RegistryClient(address, token)) as me:
        batch = me.recv("trainer/0")
        me.send({"step": batch["step"], "sum": float(batch["x"].sum())}, to="trainer/0")


if __name__ == "__main__":
    with RegistryServer() as registry, Endpoint("trainer/0", registry=registry) as me:
        spawn = multiprocessing.get_context("spawn")
        spawn.Process(target=rollout, args=(registry.address, registry.token)).start()
        me.send({"step": 1, "x": np.ones((1000, 1000), np.float32)}, to="rollout/0")
        print(me.statistics().connections)
        print(me.recv("rollout/0"))
