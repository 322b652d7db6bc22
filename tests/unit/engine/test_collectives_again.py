"""A collective runs again in backward as it ran in forward: together with the other ranks, and awaited."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

import recollect
from blocks import Computes
from recollect._torch_parallel import RankNotes, fake_process_group
from recollect.applying import apply_own
from recollect.engine import together
from recollect.engine.together import Agreement
from recollect.errors import PlanError
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan, digest_of
from watch import Watch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")

FUNCTIONAL: Final = "_c10d_functional::all_reduce"
VALUES: Final = ("linear.addmm", "sin", "_c10d_functional:all_reduce", "c10d:Sum", "mul")
PLAN: Final = Plan({"0": UnitPlan(dict.fromkeys(VALUES, "recompute"))})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store that two ranks share, of which this process is the first; the other joins every collective at once."""
    shared = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(together, "notes_of_group", lambda group, key: RankNotes(key, [0, 1], shared))
    monkeypatch.setattr(together, "_PATIENCE_S", 0.01)
    together._num_met.clear()
    with fake_process_group(0, 2):
        yield shared


class Sum(torch.autograd.Function):
    """As Megatron's Functions communicate: in place, in what it has made."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        total = hidden.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient


def layer(op: str) -> Computes:
    """Scales its input by a sum over ranks. [n, 8] -> [n, 8]."""

    def run(self: Any, hidden: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        hidden = self.linear(hidden).sin()
        is_functional = op == FUNCTIONAL
        return hidden * (all_reduce(hidden.detach(), "sum", dist.group.WORLD) if is_functional else Sum.apply(hidden))

    return Computes(run, linear=nn.Linear(8, 8))


def tells(store: Any, plan: Plan) -> None:
    assert dist.group.WORLD is not None
    store.set(f"recollect/{dist.group.WORLD.group_name}/1/1", digest_of(plan.units))


@pytest.mark.parametrize("op", [FUNCTIONAL, "c10d::allreduce_"])
def test_what_it_makes_is_awaited(store: Any, op: str) -> None:
    model = nn.Sequential(layer(op))
    tells(store, PLAN)
    with recollect.apply(model, PLAN), Watch() as watch:
        loss = model(torch.randn(4, 8)).sum()
        forward = Counter(watch.ops)
        loss.backward()
    again = watch.ops - forward
    assert again[op] == 1 and again["_c10d_functional::wait_tensor"] == (op == FUNCTIONAL)


@pytest.mark.parametrize("op", [FUNCTIONAL, "c10d::allreduce_"])
def test_it_does_not_run_again_before_the_other_rank_has_told_the_same_plan(store: Any, op: str) -> None:
    model = nn.Sequential(layer(op))
    tells(store, Plan({"0": UnitPlan({"sin": "recompute"})}))
    with recollect.apply(model, PLAN), Watch() as watch:
        loss = model(torch.randn(4, 8)).sum()
        with pytest.raises(PlanError, match="cannot run .*(all_reduce|Sum).* again in backward: this rank"):
            loss.backward()
    assert watch.ops[op] == 1


# Ranks that drop different collectives find out, and say so


def test_the_same_number_of_plans_is_met_on_all_ranks(store: Any) -> None:
    for number, digest in enumerate(("one", "two"), 1):
        store.set(f"recollect/tp/{number}/1", digest)
        own = Agreement(digest)
        own.meet("tp")
        own.meet("tp")
        own.check("tp", "run all_reduce again")


def test_another_plan_is_an_error_that_names_both(store: Any) -> None:
    own = Agreement("one")
    own.meet("tp")
    store.set("recollect/tp/1/1", "two")
    expected = re.escape("this rank (0) has plan one, rank 1 has two, of ranks 0, 1")
    with pytest.raises(PlanError, match=f"cannot run all_reduce again: {expected}"):
        own.check("tp", "run all_reduce again")


@pytest.mark.usefixtures("store")
def test_a_rank_without_a_plan_is_an_error() -> None:
    own = Agreement("one")
    own.meet("tp")
    with pytest.raises(PlanError, match="rank 1 has none.*send it to the others"):
        own.check("tp", "run all_reduce again")


def test_a_store_in_a_file_can_say_that_a_rank_has_no_plan(store: Any, tmp_path: Path) -> None:
    notes = RankNotes("key", [0, 1], dist.FileStore(str(tmp_path / "store"), 2))
    notes.leave("one")
    assert notes.read(0.01) == {0: "one", 1: None}


def test_a_recording_on_fake_tensors_needs_no_other_rank(store: Any) -> None:
    """One rank may plan for all of them; the others need not count what it met."""
    model = nn.Sequential(layer(FUNCTIONAL))
    profile = recollect.record(model, torch.randn(4, 8), loss_fn=torch.sum, fake=True, collectives="replay")
    plan = recollect.classic_plan(profile, "full")
    assert plan.units["0"].actions["_c10d_functional:all_reduce"] == "recompute"
    tells(store, plan)
    with recollect.apply(model, plan):
        model(torch.randn(4, 8)).sum().backward()


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("action", ["keep", "recompute"])
def test_attach_counts_only_plans_that_need_all_ranks(action: Any) -> None:
    """Ranks change between others at different times."""
    model = nn.Sequential(layer(FUNCTIONAL))
    actions: dict[str, Any] = {
        **dict.fromkeys(VALUES, "recompute"),
        "_c10d_functional:all_reduce": action,
        "c10d:Sum": "keep",
    }
    plan = Plan({"0": UnitPlan(actions)})
    with apply_own(model, plan):
        model(torch.randn(4, 8))
    assert together._num_met.total() == (action == "recompute")


def test_digests_do_not_depend_on_the_order_of_units() -> None:
    plans = UnitPlan({"a": "keep"}), UnitPlan({"a": "recompute"})
    assert digest_of({"a": plans[0], "b": plans[1]}) == digest_of({"b": plans[1], "a": plans[0]})
