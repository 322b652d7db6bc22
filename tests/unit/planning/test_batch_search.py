"""The search for the largest batch: the same answers as trying every size, from few sizes, and an error for each misuse."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from recollect.errors import (
    BudgetTooSmallError,
    ConfigError,
    ProfileFormatError,
    RecordError,
    UnsupportedModelError,
)
from recollect.planning.batch_search import search_batches
from recollect.planning.choose import Planner
from recollect.planning.classic import classic_plan
from recollect.profile.profile import Profile
from toy_profile import layer, stack

NUM_LAYERS = 3
MOST = 32


def step_of(size: int, *, seconds: Callable[[int], float] = lambda size: 5.0 + size) -> Profile:
    """A step whose activations grow with the size, a little faster than it, and whose time is as given."""
    grown = size + size**2 // 64
    graph = layer(norm_bytes=20 * grown, up_bytes=80 * grown, act_bytes=80 * grown, out_bytes=10 * grown)
    return replace(stack(NUM_LAYERS, graph=graph), step_s=seconds(size), device_memory_bytes=100_000, device_name="Toy")


@cache
def planner_of(size: int) -> Planner:
    return Planner(step_of(size))


def fitting(budget_bytes: int, most: int = MOST) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"plain": [], "full": [], "planned": []}
    for size in range(1, most + 1):
        planner = planner_of(size)
        full_bytes = classic_plan(planner.profile, "full").predicted_peak_bytes or 0
        found["plain"] += [size] * (planner.plain_peak_bytes <= budget_bytes)
        found["full"] += [size] * (full_bytes <= budget_bytes)
        try:
            planner.plan(budget_bytes)
        except BudgetTooSmallError:
            continue
        found["planned"].append(size)
    return found


@pytest.mark.parametrize("budget_bytes", [3_000, 13_000])
def test_as_large_as_by_trying_every_size(budget_bytes: int) -> None:
    sizes = fitting(budget_bytes)
    assert len(sizes["planned"]) < MOST
    found = search_batches(step_of, budget_bytes)
    assert found.planned.size == max(sizes["planned"])
    for answer, name in ((found.without_recompute, "plain"), (found.full_recompute, "full")):
        assert (answer.size if answer else None) == max(sizes[name], default=None)
    # Verified, not interpolated: the next size was tried, too.
    tried = {row.size: row for row in found.tried}
    for size in (max(sizes[name], default=0) for name in sizes):
        assert size + 1 in tried
    assert tried[found.planned.size + 1].plan is None
    assert (tried[found.planned.size + 1].least_peak_bytes or 0) > budget_bytes
    assert [row.size for row in found.tried] == sorted(tried)


@pytest.mark.parametrize("budget_bytes", [20_000, 1_000_000, 100_000_000])
def test_few_sizes_are_tried(budget_bytes: int) -> None:
    found = search_batches(step_of, budget_bytes)
    assert len(found.tried) <= 3 * math.log2(found.planned.size)


def test_a_row_is_what_the_planner_says() -> None:
    found = search_batches(step_of, 5_000, tokens_each=7)
    for row in found.tried:
        profile = step_of(row.size)
        assert row.num_tokens == 7 * row.size
        assert row.step_s == profile.step_s
        assert row.plain_peak_bytes == planner_of(row.size).plain_peak_bytes
        full = classic_plan(profile, "full")
        assert (row.full_peak_bytes, row.full_slowdown) == (full.predicted_peak_bytes, full.predicted_slowdown)
        if row.plan is None:
            assert (row.peak_bytes, row.slowdown, row.tokens_per_s) == (None, None, None)
            continue
        assert row.plan == Planner(profile).plan(5_000)
        assert row.peak_bytes is not None
        assert row.peak_bytes <= 5_000
        assert row.least_peak_bytes is None
        assert row.slowdown is not None
        assert row.tokens_per_s == row.num_tokens / (row.step_s * (1 + row.slowdown))


@pytest.mark.parametrize(
    ("seconds", "is_largest"), [(lambda size: 5.0 + size, True), (lambda size: 5.0 + size + size**2 / 20, False)]
)
def test_most_tokens_per_second(seconds: Callable[[int], float], is_largest: bool) -> None:
    """The second device is slower for long batches, so its fastest one is smaller than what fits."""
    budget_bytes = 13_000
    found = search_batches(lambda size: step_of(size, seconds=seconds), budget_bytes)
    speeds = {}
    for size in range(1, found.planned.size + 1):
        profile = step_of(size, seconds=seconds)
        speeds[size] = size / (profile.step_s * (1 + (Planner(profile).plan(budget_bytes).predicted_slowdown or 0.0)))
    assert (found.fastest.size >= 0.9 * found.planned.size) is is_largest
    # Half a percent is what the search does not tell apart.
    assert (found.fastest.tokens_per_s or 0) >= 0.995 * max(speeds.values())


def test_no_times_no_speed() -> None:
    found = search_batches(lambda size: step_of(size, seconds=lambda size: 0.0), 5_000)
    assert found.fastest.size == 1
    assert found.fastest.tokens_per_s == 0


def test_the_limit_is_at_least() -> None:
    found = search_batches(step_of, 8_000, max_size=11, multiple_of=2)
    assert found.limit == 10
    assert [found.size_text(row) for row in (found.without_recompute, found.planned, None)] == [
        "8",
        "at least 10",
        "none",
    ]
    assert max(row.size for row in found.tried) == 10
    alone = search_batches(step_of, 13_000, max_size=1)
    assert [row.size for row in alone.tried] == [1]
    assert alone.size_text(alone.planned) == "at least 1"


def test_text() -> None:
    found = search_batches(step_of, 2_400, along="micro-batch")
    assert str(found).splitlines()[:4] == [
        "largest micro-batch within 2.3 KiB",
        "  without recompute    2",
        "  with full recompute  4",
        "  with a plan          5",
    ]
    assert str(found).splitlines()[4].startswith("most tokens per second at micro-batch 5: 0 tokens/s of Toy, modelled")


def test_nothing_fits() -> None:
    with pytest.raises(BudgetTooSmallError) as caught:
        search_batches(step_of, 1_200, multiple_of=2, along="micro-batch")
    with pytest.raises(BudgetTooSmallError) as known:
        Planner(step_of(2)).plan(1_200)
    error = caught.value
    assert (error.least_peak_bytes, error.unit) == (known.value.least_peak_bytes, known.value.unit)
    assert error.advice[0] == "No smaller micro-batch than 2 is allowed."
    # It would be advice to do what was just found impossible.
    assert "Use shorter sequences: about " in str(known.value)
    assert "shorter sequences" not in str(error) and "smaller micro-batch, with" not in str(error)
    assert "go to host memory" in str(error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tokens_each": 0},
            "got tokens_each=0: not a whole number, 1 or more. Set tokens_each to one, or leave it out.",
        ),
        ({"multiple_of": -2}, "got multiple_of=-2: not a whole number"),
        ({"max_size": 2.5}, "got max_size=2.5: not a whole number"),
        (
            {"multiple_of": 8, "max_size": 7},
            "got multiple_of=8, max_size=7: no size is a multiple within the limit. Set max_size to 8 or more.",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search_batches(step_of, 5_000, **settings)
    assert str(caught.value).startswith(message)


def test_a_step_that_does_not_grow() -> None:
    with pytest.raises(RecordError) as caught:
        search_batches(lambda size: step_of(2), 5_000, max_size=16)
    assert str(caught.value) == (
        "the steps of size 1 and 16 are the same, expected one that grows with the size: make_batch has to use its argument."
    )


def failing_from(size: int, error: Exception) -> Callable[[int], Profile]:
    def record(asked: int) -> Profile:
        if asked >= size:
            raise error
        return step_of(asked)

    return record


@pytest.mark.parametrize("error", [RecordError("no."), ConfigError(settings={"a": 1}, reason="no", advice="no.")])
def test_a_size_that_cannot_be_recorded(error: Exception) -> None:
    with pytest.raises(RecordError) as caught:
        search_batches(failing_from(3, error), 50_000, along="seq-length")
    (failed,) = {size for size in range(3, 9) if str(caught.value).startswith(f"seq-length {size}: {error}")}
    hint = str(caught.value).removeprefix(f"seq-length {failed}: {error}")
    assert hint == " seq-length 2 could be recorded; if the model takes no more, set max_size."
    assert caught.value.__cause__ is error


def test_the_smallest_size_cannot_be_recorded() -> None:
    with pytest.raises(RecordError, match=r"^size 1: no\.$"):
        search_batches(failing_from(1, RecordError("no.")), 5_000)
    with pytest.raises(UnsupportedModelError, match=r"^no\.$"):
        search_batches(failing_from(1, UnsupportedModelError("no.")), 5_000)
    with pytest.raises(ProfileFormatError, match="got no memory events"):
        search_batches(lambda size: replace(step_of(size), log=type(step_of(1).log)()), 5_000)
