from rlinf.workers import Cluster, Worker, stage, wait_all


class Squarer(Worker):
    @stage
    def square(self, numbers: list[int]) -> list[int]:
        return [number * number for number in numbers]


class Adder(Worker):
    @stage
    def add(self, squares: list[int]) -> int:
        return sum(squares)


with Cluster(launcher="inline") as cluster:  # "ray": a process a worker, nothing else changes
    squarer, adder = Squarer.group(cluster, count=2).launch(), Adder.group(cluster).launch()
    numbers, squares = cluster.channels(1, "numbers", "squares")
    numbers.put_many(list(range(10)))
    numbers.close()
    reports = wait_all([squarer.square(numbers, squares), adder.add(squares)])
    print("sum of squares:", sum(reports[1][0].values))
