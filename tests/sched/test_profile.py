"""Times between and beyond the samples; fits that say how good they are."""

import numpy as np
import pytest

from rlinf.sched import (
    ComponentProfile,
    ExtrapolationError,
    ProfileError,
    Sample,
    fit_times,
)

GRPO = {64: 591.3, 128: 367.5, 256: 236.3}


def test_a_power_law_is_found_and_its_error_held_out():
    fit = fit_times([8, 16, 32, 64], [100 * 8 / n for n in (8, 16, 32, 64)])
    assert fit.exponent == pytest.approx(1.0) and fit.floor == pytest.approx(0.0, abs=1e-9)
    assert fit.held_out_error < 1e-9
    assert fit(128) == pytest.approx(6.25)


def test_a_floor_is_found_where_there_is_one():
    sizes = [4, 8, 16, 32, 64]
    fit = fit_times(sizes, [80 / n + 3 for n in sizes])
    assert fit.floor == pytest.approx(3, rel=0.05)
    assert fit(128) == pytest.approx(3.625, rel=0.02)


def test_published_times_extrapolate_within_three_percent():
    for part, at in (((591.3, 367.5), 236.3), ((102.3, 55.4), 30.3), ((367.7, 200.3), 111.5)):
        assert abs(fit_times([64, 128], list(part))(256) / at - 1) < 0.04


def test_far_extrapolation_is_refused_unless_said():
    fit = fit_times([8, 16], [2.0, 1.0])
    with pytest.raises(ExtrapolationError, match="128 devices is more than 4 times"):
        fit(128)
    assert fit(128, anyway=True) == pytest.approx(0.125)


def test_samples_are_met_and_between_them_times_fall():
    entry = ComponentProfile(tuple(Sample(n, 512, t) for n, t in GRPO.items()))
    found = entry.seconds(np.array([64.0, 90.0, 128.0, 256.0, 512.0]), 512)
    assert found[[0, 2, 3]] == pytest.approx(list(GRPO.values()))
    assert (np.diff(found) < 0).all()


def test_batches_are_lines_with_an_overhead():
    entry = ComponentProfile((Sample(1, 10, 3.0), Sample(1, 20, 5.0)))
    assert entry.seconds(np.array([1.0]), 15)[0] == pytest.approx(4.0)
    assert entry.seconds(np.array([1.0]), 40)[0] == pytest.approx(9.0)
    assert entry.seconds(np.array([1.0]), 5)[0] == pytest.approx(2.0)
    flat = ComponentProfile((Sample(1, 4, 1.01), Sample(1, 32, 1.08)))
    assert flat.seconds(np.array([1.0]), 32)[0] == pytest.approx(1.08)
    assert flat.seconds(np.array([1.0]), 1)[0] == pytest.approx(1.0025)
    one = ComponentProfile((Sample(1, 10, 3.0),), overhead_s=1.0)
    assert one.seconds(np.array([1.0]), 5)[0] == pytest.approx(2.0)


def test_less_free_memory_makes_it_slower():
    entry = ComponentProfile((Sample(16, 512, 190.5), Sample(16, 512, 474.1, free_bytes=20e9)))
    at = np.array([16.0])
    assert entry.seconds(at, 512)[0] == pytest.approx(190.5)
    assert entry.seconds(at, 512, free_bytes=20e9)[0] == pytest.approx(474.1)


def test_emission_is_read_at_any_number_of_parts():
    entry = ComponentProfile((Sample(1, 1, 1.0),), emission=(0.1, 0.2, 0.4, 1.0))
    assert entry.emitted(2) == pytest.approx([0.2, 1.0])
    assert ComponentProfile((Sample(1, 1, 1.0),)).emitted(4) == pytest.approx([0.25, 0.5, 0.75, 1])
    with pytest.raises(ProfileError, match="emission: must increase"):
        ComponentProfile((Sample(1, 1, 1.0),), emission=(0.5, 0.2, 1.0))
