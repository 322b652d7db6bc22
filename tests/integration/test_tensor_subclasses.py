"""Tensor subclasses desugar before they reach the tape, which records the ops on what is inside of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from blocks import Stack, built
from gradients import assert_same_gradients
from policies import FEW_PLANS, FULL, Policy
from rank_programs import run_on_ranks, tensor_parallel
from recollect.applying import apply_policy
from watch import Watch


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")
def test_tensor_parallel_by_dtensor(tmp_path: Path) -> None:
    for rank in run_on_ranks(tensor_parallel, tmp_path):
        for way in ("full", "nothing-kept", "random"):
            assert_same_gradients(rank["plain"]["gradients"], rank[way]["gradients"])
        assert rank["full"]["kept bytes"] < rank["plain"]["kept bytes"]


def _step(model: Stack, data: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(data).square().mean().backward()
    return {
        f"{name} {half}": getattr(parameter.grad, half).clone()
        for name, parameter in model.named_parameters()
        for half in ("a", "b")
    }


@pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
def test_wrapper_of_two_tensors(policy: Policy) -> None:
    model: Stack = built(Stack)
    data = TwoTensor(torch.randn(4, 16), torch.randn(4, 16))
    expected = _step(model, data)
    with apply_policy(model, model.layers, policy):
        assert_same_gradients(expected, _step(model, data))


def test_dropped_values_of_a_wrapper_do_recompute() -> None:
    model: Stack = built(Stack)
    data = TwoTensor(torch.randn(4, 16), torch.randn(4, 16))
    with Watch() as watch:
        _step(model, data)
    plain = watch.computing_ops().total()
    with apply_policy(model, model.layers, FULL), Watch() as watch:
        _step(model, data)
    assert watch.computing_ops().total() > plain
