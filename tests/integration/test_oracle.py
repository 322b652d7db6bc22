"""Predicted peaks against an independent oracle: PyTorch's `MemTracker`, which follows storages by their deaths.

It watches the very steps that the tape runs, on fake tensors and on real ones, and shares no code with recorder, simulator
or meter. It is a private module of PyTorch, so it is used here only.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import recollect
from budgets import budgets
from gradients import call as call_model
from gradients import loss_of
from predictions import CASES, LEAN_LOOP, MAIN_CASES, MOST_OVER_BYTES, larger
from recollect.planning.choose import Planner
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from tiers import long, long_but
from zoo import Case

# Routing depends on data, which fake tensors do not have.
ROUTED = ("mixtral", "deepseek_v3")


def plans(profile: Profile) -> Iterator[Plan]:
    yield recollect.classic_plan(profile, "keep_all")
    yield recollect.classic_plan(profile, "full")
    planner = Planner(profile)
    for budget in budgets(planner, (0.3, 0.6)):
        yield planner.plan(budget)


def tracked_peak_bytes(case: Case, plan: Plan, *, fake: bool) -> int:
    """What the oracle sees of forward and backward, parameters and batch included."""
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext():
        model, batch = case.model(), larger(case.data())
        assert isinstance(batch, dict)
        tracker = MemTracker()
        tracker.track_external(model, *batch.values())
        with recollect.apply(model, plan), tracker:
            loss_of(call_model(model, batch), case.loss_fn).backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return int(next(nbytes for kind, nbytes in peak.items() if str(kind) == "Total"))


# What the others take is measured in `test_prediction.py`.
@pytest.mark.parametrize("name", long_but(("reference",), MAIN_CASES))
@pytest.mark.parametrize("fake", [*long([True]), False], ids=["fake", "real"])
def test_predicted_peak_is_what_the_oracle_sees(name: str, fake: bool) -> None:
    if fake and name in ROUTED:
        pytest.skip("routing depends on data, which fake tensors do not have")
    case = CASES[name]
    profile = recollect.record(case.model(), larger(case.data()), loss_fn=case.loss_fn, fake=fake, **LEAN_LOOP)
    # Generator states of dropouts are made in C++, where the oracle does not look.
    unseen_bytes = sum(op.state_bytes for call in profile.calls for op in profile.graph_of(call).ops)
    for plan in plans(profile):
        assert plan.predicted_peak_bytes is not None
        off_bytes = tracked_peak_bytes(case, plan, fake=fake) - plan.predicted_peak_bytes
        # A fake profile is calibrated by nothing, so it has no room added either: equal to the byte.
        most_over_bytes = unseen_bytes + (0 if fake else MOST_OVER_BYTES)
        assert -most_over_bytes <= off_bytes <= 0, plan
