from rlinf.sched import Component, ComponentProfile, FlowGraph, Profile, Sample, search

SIZES = (4, 8, 16, 32, 64, 128)
TIMES = {
    "rollout": {64: 591, 128: 368},
    "logprob": {64: 102, 128: 55},
    "train": {64: 368, 128: 200},
}

graph = FlowGraph.chain(*(Component(name, SIZES) for name in TIMES))
profile = Profile(
    {n: ComponentProfile(tuple(Sample(k, 512, t) for k, t in s.items())) for n, s in TIMES.items()}
)
plan = search(graph, profile, devices=128, batch=512)
print(plan.tree())
plan.save("plan.yaml")
