"""Classic failures of activation checkpointing, each shown once with PyTorch's own and once with recollect.

More are on the page of bugs of others, which `test_guides.py` runs; those of two processes in `test_failures_parallel.py`.
"""

import pytest
import torch
from torch import Tensor, nn

from blocks import Stack, built, mean_square, partitioned
from gradients import assert_same_gradients, call, gradients, step_of
from policies import FEW_PLANS, Policy
from recollect.applying import apply_policy
from zoo import ZOO

few_plans = pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
LLAMA, PADDED_LLAMA = ZOO["llama"], ZOO["llama_padded"]


def rows(count: int = 6, width: int = 16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, width)


# ZeRO-3 with frozen parameters


def _with_frozen_norms() -> Stack:
    model: Stack = built(Stack)
    for block in model.blocks:
        block.norm.requires_grad_(False)
        block.up.requires_grad_(False)
    return model


def _leaves_of_blocks(model: Stack) -> list[nn.Module]:
    """The granularity of DeepSpeed: each linear layer and norm is gathered by itself."""
    return [module for block in model.blocks for module in block.children()]


@few_plans
def test_partitioned_frozen_parameters_with_recollect(policy: Policy) -> None:
    model = _with_frozen_norms()
    expected = gradients(model, rows(), mean_square)
    for modules in (_leaves_of_blocks(model), list(model.blocks)):
        with partitioned(modules), apply_policy(model, model.layers, policy):
            assert_same_gradients(expected, gradients(model, rows(), mean_square))


# Re-running Python changes state twice


@few_plans
def test_cache_grows_once_with_recollect(policy: Policy) -> None:
    """Transformers' flag avoids this by switching the cache off; here it may stay on."""
    for case in (LLAMA, PADDED_LLAMA):
        model = case.model()
        expected = step_of(case, model)
        with apply_policy(model, case.layers, policy):
            assert_same_gradients(expected, step_of(case, model))
            output = call(model, case.data())
            output.loss.backward()
            assert output.past_key_values.get_seq_length() == 12


# No effect outside of training mode


# A kept value is written in place
