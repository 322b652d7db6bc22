"""The peak of every unit of the registry is predicted to the byte, run from its trace under a plan by coins.

The third step of a loop is measured: the first runs on the tape, and the second is traced.
"""

from typing import Any

import pytest
import torch

import recollect
from contract_units import ROWS, UNITS, WIDTH, Case
from recollect.planning.trace_planner import traced_where_known
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.simulation.predicted import predicted_plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:recollect"),
    pytest.mark.filterwarnings("ignore:none of the"),
    pytest.mark.filterwarnings(r"ignore:.*`torch\.jit\.\w+` is deprecated"),
]

# What PyTorch makes out of sight, and the room that is left for it.
UNSEEN_BYTES = 2048


def coins(profile: Profile, seed: int) -> Plan:
    units: dict[str, UnitPlan] = {}
    generator = torch.Generator().manual_seed(seed)
    for call in profile.calls:
        values = [value for value in profile.graph_of(call).values if value.producer is not None]
        dropped = torch.rand(len(values), generator=generator) < (0.3, 0.7, 1.1)[seed % 3]
        actions: Any = {
            value.name: "recompute" if drops and not value.must_keep else "keep"
            for value, drops in zip(values, dropped, strict=True)
        }
        units.setdefault(call.path, UnitPlan(actions))
    return traced_where_known(profile, Plan(units))


# A few of the registry: to trace one takes a second.
NAMES = (
    "feed forward", "causal sdpa", "alpha dropout", "batch norm", "dropout", "noise", "in place", "filled by parts",
    "weights shared by units", "dict out", "kept value out", "input with many readers", "cross attention",
)  # fmt: skip


@pytest.mark.parametrize("case", [UNITS[name] for name in NAMES], ids=NAMES)
def test_peak(case: Case) -> None:
    model = case.model()
    data = torch.randn(ROWS, WIDTH, dtype=case.dtype)

    def step() -> None:
        model.zero_grad()
        sum(model(data)).backward()

    profile = recollect.record(model, step=step, units=model.paths, engine="graph")
    seed = list(UNITS).index(case.name)
    plan = predicted_plan(profile, coins(profile, seed))
    with recollect.apply(model, plan):
        step()
        step()
        model.zero_grad()
        measured = profile.persistent_bytes + recollect.measure_peak(step, device="cpu").peak_growth_bytes
    assert measured <= (plan.predicted_peak_bytes or 0) <= measured + UNSEEN_BYTES
