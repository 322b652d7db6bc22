"""What the tape knows of ops: read off schemas and tables."""

from typing import Any

import pytest
import torch

from recollect.engine.facts import facts_of

aten = torch.ops.aten


def test_record_stream_writes_nothing() -> None:
    facts = facts_of(aten.record_stream.default)
    assert facts.writes == ()
    assert facts.is_view
    assert not facts.changes_storage


def test_what_names_a_part_of_a_trace_computes_nothing() -> None:
    """FSDP2 does so inside of units; its result is no tensor."""
    assert facts_of(torch.ops.profiler._record_function_enter_new.default).is_view


@pytest.mark.parametrize("op", [aten.scatter.src, aten.scatter_.src, aten.index_copy.default, aten.index_put_.default])
def test_results_that_hang_on_an_order_are_kept_on_cuda(op: Any) -> None:
    facts = facts_of(op)
    assert facts.keeps_on_cuda
    assert facts.may_keep


@pytest.mark.parametrize("op", [aten.scatter.value, aten.scatter_.value, aten.mm.default])
def test_results_without_an_order_are_not(op: Any) -> None:
    assert not facts_of(op).keeps_on_cuda
