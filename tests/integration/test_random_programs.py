"""Random programs under random plans: the same bits as without a plan, or the error that there was without it.

`RECOLLECT_EXAMPLES` sets the number of examples of each property (default 150).
"""

import os
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from torch import Tensor

import recollect
from engines import traced
from gradients import Step, assert_same_gradients, gradients
from policies import FULL, KEEP_ALL, NOTHING_KEPT, Policy, Random
from predictions import LEAN_LOOP
from programs import FAMILIES, ROWS, WIDTH, Chain, Instruction, Program, Recipe
from recollect.applying import apply_policy
from recollect.errors import MutatedValueError
from recollect.profile.graph import ValueRecord
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.program import Program as StepProgram
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import windows

pytestmark = pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")

bounded = settings(
    max_examples=int(os.environ.get("RECOLLECT_EXAMPLES", "150")),
    deadline=None,
    derandomize="RECOLLECT_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)

POSITION = st.integers(0, 11)
# Every family of ops is as likely as any other, though some have more members.
OP = st.one_of(*(st.sampled_from(sorted(family)) for family in FAMILIES))
STEPS = st.lists(st.builds(Instruction, OP, POSITION, POSITION, st.integers(0, 5)), min_size=1, max_size=12).map(tuple)
PROGRAM = st.builds(Program, STEPS, st.integers(-6, -1), st.integers(-6, -1))


def recipes(writes_outside: bool, trains_stem: st.SearchStrategy[bool]) -> st.SearchStrategy[Recipe]:
    programs = st.lists(PROGRAM, min_size=1, max_size=2).map(tuple)
    calls = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)
    return st.builds(Recipe, programs, calls, st.just(writes_outside), trains_stem)


RECIPE = recipes(False, st.sampled_from([True, True, False]))
RECIPE_WITH_OUTSIDE_WRITES = recipes(True, st.booleans())
POLICY: st.SearchStrategy[Policy] = st.one_of(
    st.sampled_from([FULL, NOTHING_KEPT]), st.builds(Random, st.integers(0, 1000))
)


def built(recipe: Recipe) -> tuple[Chain, Tensor]:
    torch.manual_seed(0)
    return Chain(recipe), torch.randn(ROWS, WIDTH)


def attempt(model: Chain, data: Tensor, *, saves_copies: bool = False) -> Step | RuntimeError:
    """A step, or the error it raised.

    With `saves_copies` autograd's saved tensors are copied when they are saved, so that later writes cannot reach them:
    what the plain step would compute if it did not have to refuse.
    """
    try:
        if not saves_copies:
            return gradients(model, data)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return gradients(model, data)
    except RuntimeError as error:
        return error


def check(recipe: Recipe, policy: Policy, *, may_refuse: bool) -> None:
    model, data = built(recipe)
    expected = attempt(model, data)
    with apply_policy(model, model.units, policy):
        got = attempt(model, data)
    if isinstance(got, MutatedValueError) and may_refuse:
        event("recollect refuses")
    elif isinstance(expected, dict):
        event("equal")
        if isinstance(got, RuntimeError):
            raise got
        assert_same_gradients(expected, got)
    elif isinstance(got, RuntimeError):
        event("both refuse")
    else:
        event("plain refuses, recollect is right")
        assert "inplace" in str(expected), "plain autograd refuses a write, and nothing else"
        reference = attempt(model, data, saves_copies=True)
        assert isinstance(reference, dict)
        torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-5, equal_nan=True)


@bounded
@given(RECIPE, POLICY)
def test_programs_that_write_inside_layers(recipe: Recipe, policy: Policy) -> None:
    check(recipe, policy, may_refuse=False)


@bounded
@given(RECIPE_WITH_OUTSIDE_WRITES, POLICY)
def test_programs_that_write_outside_of_layers(recipe: Recipe, policy: Policy) -> None:
    """A write that the tape cannot see may be refused, but never gives another gradient."""
    check(recipe, policy, may_refuse=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:recollect.*run on the tape, exactly")
@settings(bounded, max_examples=max(1, bounded.max_examples // 3))
@given(RECIPE, POLICY)
def test_programs_from_traces(recipe: Recipe, policy: Policy) -> None:
    """Steps on the tape, while layers are traced, and from traces, at last as chains that let go of gradients early."""
    model, data = built(recipe)
    expected = attempt(model, data)
    assume(isinstance(expected, dict))
    with traced(model, model.units, policy):
        for step in range(4):
            if step == 3:
                model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: None)
            got = attempt(model, data)
            if isinstance(got, RuntimeError):
                raise got
            assert isinstance(expected, dict)
            assert_same_gradients(expected, got)


@bounded
@given(RECIPE)
def test_keeping_everything_changes_nothing(recipe: Recipe) -> None:
    check(recipe, KEEP_ALL, may_refuse=False)


@settings(bounded, max_examples=max(1, bounded.max_examples // 10))
@given(RECIPE, st.randoms(use_true_random=False))
def test_peaks_as_sums_over_units(recipe: Recipe, rng: random.Random) -> None:
    """What ties calls together, as programs have it that were recorded: views, writes, layers that run twice."""
    model, data = built(recipe)
    try:
        profile = recollect.record(model, data, units=model.units, **LEAN_LOOP)
    except RuntimeError:
        assume(False)
    program = StepProgram(profile, windows(profile))
    peak_sums = PeakSums(program)
    for share in (0.2, 0.5, 1.0):
        decisions = [
            CallActions(
                ValueActions.recomputing(
                    i for i, v in enumerate(profile.graph_of(call).values) if is_dropped(v, share, rng)
                ),
                keeps_output=rng.random() < 0.5,
            )
            for call in profile.calls
        ]
        expected, got = simulate(profile, decisions, program=program), peak_sums.peaks(decisions)
        assert got.peak_bytes == expected.peak_bytes
        assert (got.recompute_s, got.window_peaks) == (expected.recompute_s, expected.window_peaks)


def is_dropped(value: ValueRecord, share: float, rng: random.Random) -> bool:
    return value.producer is not None and not value.must_keep and rng.random() < share
