from rlinf.channel import Channel, ChannelServer, DeviceLock
from rlinf.comm import Endpoint, MemoryRegistry

registry = MemoryRegistry()  # between processes: RegistryServer, RegistryClient
with (
    Endpoint("channel/0", registry=registry) as host,
    ChannelServer(host),
    Endpoint("rollout/0", registry=registry) as rollout,
    Endpoint("trainer/0", registry=registry) as trainer,
):
    samples = Channel.create("samples", rollout)
    samples.put_many([{"tokens": n} for n in (70, 20, 20, 10)], weights=[70, 20, 20, 10])
    samples.close()
    mine = samples.ref.open(trainer)
    print(mine.get_batch(target_weight=50))  # the first is heavier: it comes alone
    with mine.lease_batch(max_items=8) as lease, DeviceLock(trainer, ["core:0"]).hold((0, 1)):
        print(list(lease))  # acknowledged at the end of the block, returned on an exception
    print(list(mine), samples.statistics().acknowledged_items)
