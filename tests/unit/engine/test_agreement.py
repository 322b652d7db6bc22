"""Ranks that drop different collectives find out, and say so."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from recollect._torch_parallel import RankNotes
from recollect.engine import together
from recollect.engine.together import Agreement
from recollect.errors import PlanError
from recollect.plans.unit_plan import UnitPlan, digest_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store that two ranks share; this process is the first of them."""
    dist.init_process_group("fake", rank=0, world_size=2)
    shared = dist.HashStore()
    monkeypatch.setattr(together, "notes_of_group", lambda group, key: RankNotes(key, [0, 1], shared))
    monkeypatch.setattr(together, "_PATIENCE_S", 0.01)
    together._num_met.clear()
    yield shared
    dist.destroy_process_group()


def test_equal_plans_agree(store: Any) -> None:
    own = Agreement("one")
    own.meet("tp")
    store.set("recollect/tp/1/1", "one")
    own.check("tp", "run all_reduce again")


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


def test_digests_differ_with_what_is_dropped() -> None:
    plans = [
        UnitPlan({"a": "keep"}),
        UnitPlan({"a": "recompute"}),
        UnitPlan({"a": "keep"}, output="recompute"),
        UnitPlan({}, engine="compile"),
    ]
    assert len({digest_of({"layers.0": plan}) for plan in plans}) == 4
    assert digest_of({"a": plans[0], "b": plans[1]}) == digest_of({"b": plans[1], "a": plans[0]})
