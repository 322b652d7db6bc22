"""What the tape knows of ops: read off schemas and tables."""

from typing import Any

import pytest
import torch

from recollect._torch_private import FakeTensorMode
from recollect.engine.draws import draws_unknown
from recollect.engine.facts import facts_of, must_keep_result

aten = torch.ops.aten


def test_record_stream_writes_nothing() -> None:
    facts = facts_of(aten.record_stream.default)
    assert facts.writes == ()
    assert facts.is_view
    assert not facts.changes_storage


def test_what_names_a_part_of_a_trace_computes_nothing() -> None:
    """FSDP2 does so inside of units; its result is no tensor."""
    assert facts_of(torch.ops.profiler._record_function_enter_new.default).is_view


@pytest.mark.parametrize(
    "op", [aten.scatter.src, aten.scatter_.src, aten.index_copy.default, aten.index_put_.default, aten.cumprod.default]
)
def test_results_that_hang_on_an_order_are_kept_on_cuda(op: Any) -> None:
    facts = facts_of(op)
    assert facts.keeps_on_cuda
    assert facts.may_keep


@pytest.mark.parametrize("op", [aten.scatter.value, aten.scatter_.value, aten.mm.default])
def test_results_without_an_order_are_not(op: Any) -> None:
    assert not facts_of(op).keeps_on_cuda


@pytest.mark.parametrize("searches", [False, True])
def test_convolutions_are_kept_where_each_thread_searches_for_its_own_kernel(searches: bool) -> None:
    facts = facts_of(aten.convolution.default)
    with FakeTensorMode():
        here, there = torch.empty(2), torch.empty(2, device="cuda")
    with torch.backends.cudnn.flags(benchmark=searches):
        assert not must_keep_result(facts, [here], here, {})
        assert must_keep_result(facts, [there], there, {}) == searches
    assert facts.may_keep


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recurrent_layers_draw_only_for_dropout(dropout: float) -> None:
    x, cudnn_lstm = torch.empty(2, 3, 4), aten._cudnn_rnn.default
    arguments = [x, [], 4, None, x, x, 2, 4, 0, 2, True, dropout, True, False, [], None]
    assert draws_unknown(facts_of(cudnn_lstm), arguments, {}) == (dropout > 0)
