"""No unit of the registry has an engine do what a CUDA graph does not repeat: read tensors, generators' states, or clocks.

Steps run as if they were captured (`support/capture_checker.py`), on any device, after others that warm up. They have the
bits of the same steps without a plan. A unit that would have to draw the same random numbers again is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recollect
from capture_checker import CaptureChecker
from contract_steps import QUIET, Run, accumulated, plain, twice
from contract_units import ROWS, UNITS, WIDTH, Case
from engines import applied
from gradients import Step, assert_same_gradients
from policies import DRAWS, FULL, AllButDraws, Uniform
from recollect.engine.facts import facts_of
from recollect.errors import ConfigError
from tiers import long_but

pytestmark = QUIET

WARM_UP = (plain, plain, accumulated, twice)
CAPTURED = (plain, accumulated, twice)

# Those that draw numbers which the tape would have to draw again.
DRAWING = frozenset(
    {"gumbel softmax", "custom op that draws", "alpha dropout", "encoder layer", "channel dropout", "lstm", "dropout"}
    | {"attention with weights", "attention dropout", "noise", "own generator", "seeds of its own", "low rank adapter"}
    | {"unit called three times", "own checkpoint", "branch on training", "number drawn and read"}
)
# Those and others with random ops: what is kept of the rest is what is kept where all is recomputed.
WITH_DRAWS = DRAWING | {"random relu", "random relu in place", "causal sdpa", "masked sdpa"}

# Their own code reads tensors, which no capture allows; traced, guards read them in its place.
READING = frozenset({"lengths read", "number read", "numbers checked"})

REFUSED = r"got \S+ in unit '[\w.]+'='recompute', torch\.cuda\.graph='capturing': to draw the same random numbers"


@cache
def without_a_plan(name: str, sees_ops: bool) -> Step:
    return captured(Run(UNITS[name].model()), CaptureChecker(sees_ops=sees_ops))


def captured(run: Run, checker: CaptureChecker) -> Step:
    run.through(*WARM_UP)
    with checker.running():
        return run.through(*CAPTURED)


@contextmanager
def on(engine: str, run: Run, policy: Uniform) -> Iterator[None]:
    if engine != "checkpoint":
        with applied(engine, run.model, policy):
            yield
        return
    options: dict[str, Any] = {}
    if policy != FULL:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, saves_draws)
    for unit in run.model.units:
        vars(unit)["forward"] = partial(recollect.checkpoint, unit.forward, **options)
    yield


def saves_draws(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if facts_of(op).name in DRAWS else CheckpointPolicy.PREFER_RECOMPUTE


def assert_nothing_found(case: Case, engine: str, policy: Uniform) -> None:
    sees_ops = engine != "graph"
    expected = without_a_plan(case.name, sees_ops)
    run, checker = Run(case.model()), CaptureChecker(sees_ops=sees_ops)
    with on(engine, run, policy):
        assert_same_gradients(expected, captured(run, checker))
    assert not checker.lines


@pytest.mark.parametrize("name", sorted(WITH_DRAWS))
def test_what_draws_is_kept(name: str) -> None:
    assert_nothing_found(UNITS[name], "tape", AllButDraws())


@pytest.mark.parametrize("name", long_but({*WITH_DRAWS, *list(UNITS)[::4]}, UNITS))
def test_a_policy_keeps_what_draws(name: str) -> None:
    assert_nothing_found(UNITS[name], "checkpoint", AllButDraws())


@pytest.mark.parametrize("name", long_but(list(UNITS)[::4], [name for name in UNITS if name not in READING]))
def test_from_traces(name: str) -> None:
    # Dropout on the CPU changes in place what it has drawn.
    assert_nothing_found(UNITS[name], "graph", AllButDraws(also=frozenset({"div_", "mul_"})))


# One of the two for each unit, and both for those that draw numbers.
RECOMPUTED = [(name, engine) for name in UNITS for engine in ("tape", "checkpoint")]
QUICK = [row for number, row in enumerate(RECOMPUTED) if row[0] in WITH_DRAWS or number % 4 in (0, 3)]


@pytest.mark.parametrize(("name", "engine"), long_but(QUICK, RECOMPUTED, are_rows=True))
def test_all_is_recomputed(name: str, engine: str) -> None:
    if name in DRAWING:
        with pytest.raises(ConfigError, match=REFUSED):
            assert_nothing_found(UNITS[name], engine, FULL)
    else:
        assert_nothing_found(UNITS[name], engine, FULL)


@pytest.mark.parametrize("engine", ["tape", "graph"])
@pytest.mark.parametrize("name", sorted(DRAWING))
def test_plans_for_capture(name: str, engine: str) -> None:
    case = UNITS[name]
    model, data = case.model(), torch.randn(ROWS, WIDTH, dtype=case.dtype)

    def step() -> None:
        sum(model(data)).backward()

    profile = recollect.record(model, step=step, units=model.paths).for_capture()
    plan = recollect.classic_plan(profile, "full").with_engine(engine)
    expected = without_a_plan(name, engine == "tape")
    run, checker = Run(case.model()), CaptureChecker(sees_ops=engine == "tape")
    with recollect.apply(run.model, plan):
        assert_same_gradients(expected, captured(run, checker))
    assert not checker.lines


@pytest.mark.parametrize("name", ["dropout", "random relu", "custom op that draws"])
def test_traced_draws_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        assert_nothing_found(UNITS[name], "graph", FULL)
