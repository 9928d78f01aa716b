"""One program, several executions: what a plan changes, and what it must not."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from rlinf.channel import Channel, ChannelConfig
from rlinf.sched import Leaf, Placement, Plan
from rlinf.workers import ChunkRecord, Cluster, ClusterConfig, StageError, Worker, stage, wait_all
from rlinf.workers.devices import local_cores
from rlinf.workers.testing import launch, placements, prompts, run_step, shared_ray, wait_until_gone

needs_two_cores = pytest.mark.skipif(len(local_cores()) < 2, reason="one core only")


def cluster(launcher: str) -> Cluster:
    if launcher == "ray":
        shared_ray()
    return Cluster(ClusterConfig(), launcher)


def outcomes(launcher: str, kind: str, steps: int = 3) -> tuple[list[Any], list[ChunkRecord]]:
    """The results of some steps, and every chunk's record."""
    records: list[ChunkRecord] = []
    with cluster(launcher) as running:
        running.add_sink(records.append)
        groups = launch(running, placements(kind, running.devices, 12))
        results = [run_step(running, groups, step)[-1].result for step in range(1, steps + 1)]
    return results, records


@pytest.fixture(scope="module")
def reference() -> tuple[list[Any], list[ChunkRecord]]:
    return outcomes("inline", "temporal")


@needs_two_cores
@pytest.mark.parametrize(
    ("launcher", "kind"), [("inline", "spatial"), ("ray", "temporal"), ("ray", "spatial")]
)
def test_every_execution_has_the_same_outcome(
    reference: tuple[list[Any], list[ChunkRecord]], launcher: str, kind: str
) -> None:
    """Equal to the last bit: nothing depends on processes, chunks, places or turns."""
    results, records = outcomes(launcher, kind)
    assert results == reference[0]
    if kind == "temporal":
        check_turns(records)
    else:
        assert all(r.items_in == 3 for r in records if r.stage == "learn")


def check_turns(records: list[ChunkRecord]) -> None:
    ordered = sorted(records, key=lambda record: record.start)
    assert [r.stage for r in ordered] == ["sample", "score", "learn"] * 3
    assert all(a.end <= b.start for a, b in pairwise(ordered)), "they took turns"
    assert {r.items_in for r in ordered} == {12}


def test_the_program_learns(reference: tuple[list[Any], list[ChunkRecord]]) -> None:
    results, records = reference
    assert [outcome["numbers"] for outcome in results] == [prompts(s, 12) for s in (1, 2, 3)]
    assert results[0]["reward"] < results[2]["reward"]
    check_turns(records)


def test_records_say_what_was_done(reference: tuple[list[Any], list[ChunkRecord]]) -> None:
    sample = next(r for r in reference[1] if r.stage == "sample")
    assert (sample.worker, sample.iteration) == ("sampler/0", 1)
    assert (sample.input, sample.output) == ("prompts.1", "samples.1")
    assert (sample.items_in, sample.items_out, sample.tokens) == (12, 12, 12 * 16)
    assert len(sample.emitted) == 12 and list(sample.emitted) == sorted(sample.emitted)
    assert sample.start <= sample.emitted[0] and sample.emitted[-1] <= sample.end
    assert sample.waited_s >= 0 and sample.locked_s >= 0


class Doubler(Worker):
    """Stages of every form."""

    @stage
    def double(self, items: list[int]) -> list[int]:
        return [2 * item for item in items]

    @stage
    def scaled(self, items: list[int], by: int, plus: int = 0) -> list[int]:
        return [item * by + plus for item in items]

    @stage
    def odd(self, items: list[int]) -> tuple[list[int], list[float]]:
        kept = [item for item in items if item % 2]
        return kept, [float(item) for item in kept]

    @stage
    def short(self, items: list[int]) -> list[int]:
        return items[1:]

    @stage
    def scalar(self, items: list[int]) -> int:
        return sum(items)

    @stage
    def twice(self, items: list[int]) -> Iterator[tuple[int, int]]:
        for item in items:
            yield 0, item

    @stage
    def halves(self, items: list[int]) -> Iterator[list[tuple[int, int]]]:
        last = list(enumerate(items))
        yield last[1::2]
        yield []
        yield last[::2]

    @stage
    def half(self, items: list[int]) -> Iterator[tuple[int, int, float]]:
        for index in range(len(items) // 2):
            yield index, items[index], 3.0


@pytest.fixture(scope="module")
def inline() -> Iterator[Cluster]:
    with Cluster(launcher="inline") as running:
        yield running


@pytest.fixture(scope="module")
def doubler(inline: Cluster) -> Any:
    return Doubler.group(inline).launch(Placement("doubler", (), 4, shared=False, position=0))


def channels(inline: Cluster, step: int, items: list[int]) -> tuple[Channel, Channel]:
    given, made = inline.channels(step, "given", "made")
    given.put_many(items)
    given.close()
    return given, made


def test_a_stage_loops_over_chunks_and_closes_its_output(inline: Cluster, doubler: Any) -> None:
    given, made = channels(inline, 1, list(range(10)))
    (report,) = doubler.double(given, made).result(30)
    assert list(made) == [2 * item for item in range(10)]
    assert [record.items_in for record in report.records] == [4, 4, 2]
    wait_until_gone(inline, given.ref.name)


def test_other_arguments_follow_the_channels(inline: Cluster, doubler: Any) -> None:
    given, made = channels(inline, 2, [1, 2])
    doubler.scaled(given, made, 10, plus=1).wait(30)
    assert list(made) == [11, 21]


def test_a_stage_may_change_the_number_of_items(inline: Cluster, doubler: Any) -> None:
    given, made = channels(inline, 3, list(range(10)))
    (report,) = doubler.odd(given, made).result(30)
    assert list(made) == [1, 3, 5, 7, 9]
    assert [record.items_out for record in report.records] == [2, 2, 1]


def test_outputs_that_are_ready_together_travel_together(inline: Cluster, doubler: Any) -> None:
    given, made = channels(inline, 5, [0, 1, 2, 3])
    (report,) = doubler.halves(given, made).result(30)
    assert list(made) == [1, 3, 0, 2]
    [record] = report.records
    one, three, zero, two = record.emitted
    assert one == three < zero == two


def test_without_an_output_the_values_come_back(inline: Cluster, doubler: Any) -> None:
    given, _ = channels(inline, 4, list(range(6)))
    (report,) = doubler.scalar(given).result(30)
    assert report.values == (0 + 1 + 2 + 3, 4 + 5)


def test_a_stage_called_without_channels_is_a_plain_call(doubler: Any) -> None:
    assert doubler.double([1, 2]).result(30) == [[2, 4]]
    assert doubler.half([1, 2]).result(30) == [[(0, 1, 3.0)]]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("short", "returned 3 outputs for 4 items"),
        ("scalar", "returned int"),
        ("twice", "yielded item 0, which is not one of"),
        ("half", "ended without an output for the items \\[2, 3\\]"),
    ],
)
def test_a_stage_that_breaks_the_contract_is_told_so(
    inline: Cluster, doubler: Any, method: str, words: str
) -> None:
    step = 10 + ["short", "scalar", "twice", "half"].index(method)
    given, made = channels(inline, step, [1, 2, 3, 4])
    with pytest.raises(StageError, match=f"doubler/0.{method} raised .*{words}"):
        getattr(doubler, method)(given, made).result(30)


def test_ranks_share_an_iteration(inline: Cluster) -> None:
    group = Doubler.group(inline, count=2, name="pair").launch(
        Placement("pair", (), 1, shared=False, position=0)
    )
    given, made = channels(inline, 20, list(range(40)))
    reports = group.double(given, made).result(30)
    assert sorted(made) == [2 * item for item in range(40)]
    assert sum(report.items for report in reports) == 40


@needs_two_cores
def test_ranks_of_a_plan_take_equal_parts_of_a_whole_iteration(inline: Cluster) -> None:
    plan = Plan(Leaf("halves", 2), ("core:0", "core:1"), batch=10)
    group = Doubler.group(inline, count=2, name="halves").launch(plan)
    given, made = channels(inline, 21, list(range(10)))
    reports = group.double(given, made).result(30)
    assert [record.items_in for report in reports for record in report.records] == [5, 5]
    assert sorted(made) == [2 * item for item in range(10)]


class Broken(Worker):
    @stage
    def fail(self, items: list[int]) -> list[int]:
        raise RuntimeError("no such luck")


def test_a_failed_stage_gives_up_its_iteration(inline: Cluster, doubler: Any) -> None:
    """The stages after it would wait for ever; the next iteration finds all workers free."""
    broken = Broken.group(inline).launch()
    given, made = channels(inline, 30, [1, 2])
    (last,) = inline.channels(30, "last")
    with pytest.raises(
        StageError, match=r"broken/0.fail raised RuntimeError: no such luck"
    ) as caught:
        wait_all([doubler.double(made, last), broken.fail(given, made)], timeout=30)
    assert caught.value.worker == "broken/0" and caught.value.kind == "RuntimeError"
    assert 'raise RuntimeError("no such luck")' in (caught.value.traceback or "")
    given, made = channels(inline, 30, [1, 2])
    doubler.double(given, made).wait(30)
    assert list(made) == [2, 4], "the same step again has channels of its own"


def test_a_channel_too_small_for_a_whole_iteration_is_said(inline: Cluster, doubler: Any) -> None:
    """The stage before waits for room, the one behind for the rest of the iteration."""
    whole = Doubler.group(inline, name="whole").launch(
        Placement("whole", (), None, shared=False, position=1)
    )
    given, _ = channels(inline, 31, list(range(8)))
    (small,) = inline.channels(31, "small", config=ChannelConfig(max_items=4))
    with pytest.raises(StageError, match=r"raised Standstill: channel 'small\.31' will never have"):
        wait_all([doubler.double(given, small), whole.scalar(small)], timeout=30)
