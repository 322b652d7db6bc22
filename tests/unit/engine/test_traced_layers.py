"""Traced results have the layouts of the real ones. What runs from traces, to the same bits, is in `tests/contracts`."""

from typing import Any

import pytest
import torch

from recollect.engine.facts import facts_of
from recollect.engine.graph.real_layouts import laid_out
from recollect.engine.graph.trace import FakeTensorMode

WIDTH = 8
_aten = torch.ops.aten


def test_an_error_of_the_layer_is_no_error_of_tracing() -> None:
    from recollect._torch_dynamo import raised_by_tracing

    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert not raised_by_tracing(caught.value)


ACROSS = (2, 3, WIDTH), (3 * WIDTH, 1, 3)
ONE_IMAGE = (1, 6, 2, 2), (24, 1, 12, 6)


@pytest.mark.parametrize(
    ("func", "layouts", "more"),
    [
        (_aten.softplus_backward.default, [ACROSS, ((2, 3, WIDTH), (3 * WIDTH, WIDTH, 1))], (1.0, 20.0)),
        (_aten.view.default, [ONE_IMAGE], ((1, 6, 4),)),
    ],
)
def test_traced_results_are_laid_out_as_kernels_do(func: Any, layouts: Any, more: Any) -> None:
    real = func(*(torch.empty_strided(*layout) for layout in layouts), *more)
    with FakeTensorMode():
        args = (*(torch.empty_strided(*layout) for layout in layouts), *more)
        fake = func(*args)
        assert fake.stride() != real.stride(), "PyTorch has changed: find other arguments"
        found = laid_out(func, facts_of(func), args, {}, fake)
    assert found.stride() == real.stride()
