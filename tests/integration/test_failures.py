"""Classic failures of activation checkpointing, each shown once with PyTorch's own and once with recollect.

More are on the page of bugs of others, which `test_guides.py` runs; those of two processes in `test_failures_parallel.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import hugging_face_flag
from blocks import InPlace, Stack, built, checkpointed, partitioned
from gradients import assert_same_gradients, call, gradients, step_of
from policies import FEW_PLANS, FULL, KEEP_ALL, NOTHING_KEPT, Only, Policy, Random
from recollect.applying import apply_policy
from watch import Watch
from zoo import ZOO

few_plans = pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
LLAMA, PADDED_LLAMA = ZOO["llama"], ZOO["llama_padded"]
IN_PLACE_LAYERS = ("1", "2")


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


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


def test_partitioned_frozen_parameters_with_checkpoint() -> None:
    """DeepSpeed itself needs a GPU; its mechanism is emulated: the recompute's own hooks release what it just saved."""
    model = _with_frozen_norms()
    expected = gradients(model, rows(), mean_square)
    with partitioned(_leaves_of_blocks(model)):
        assert_same_gradients(expected, gradients(model, rows(), mean_square))
        with (
            checkpointed(model, model.layers, use_reentrant=False),
            pytest.raises(
                CheckpointError, match=r"(?s)different metadata.*recomputed metadata: \{'shape': torch.Size\(\[0\]"
            ),
        ):
            gradients(model, rows(), mean_square)


@few_plans
def test_partitioned_frozen_parameters_with_recollect(policy: Policy) -> None:
    model = _with_frozen_norms()
    expected = gradients(model, rows(), mean_square)
    for modules in (_leaves_of_blocks(model), list(model.blocks)):
        with partitioned(modules), apply_policy(model, model.layers, policy):
            assert_same_gradients(expected, gradients(model, rows(), mean_square))


# Re-running Python changes state twice


def test_cache_grows_twice_with_checkpoint() -> None:
    """With padding the step fails. Without, Transformers cuts the doubled keys off; only the cache itself is wrong."""
    model = PADDED_LLAMA.model()
    with checkpointed(model, LLAMA.layers, use_reentrant=False), pytest.raises(RuntimeError, match=r"tensor a \(24\)"):
        step_of(PADDED_LLAMA, model)
    model = LLAMA.model()
    with checkpointed(model, LLAMA.layers, use_reentrant=False):
        output = call(model, LLAMA.data())
        assert output.past_key_values.get_seq_length() == 12
        output.loss.backward()
        assert output.past_key_values.get_seq_length() == 24


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


def _recomputed_ops(model: nn.Module) -> int:
    with Watch() as watch:
        step_of(LLAMA, model)
    return watch.computing_ops().total()


def test_evaluation_mode_with_the_flag_of_transformers() -> None:
    model = LLAMA.model()
    plain = _recomputed_ops(model)
    hugging_face_flag.enable(model)
    assert _recomputed_ops(model) > plain
    assert _recomputed_ops(model.eval()) == plain


def test_evaluation_mode_with_recollect() -> None:
    model = LLAMA.model()
    expected = step_of(LLAMA, model)
    plain = _recomputed_ops(model)
    with apply_policy(model, LLAMA.layers, FULL):
        in_training = _recomputed_ops(model)
        assert in_training > plain
        assert _recomputed_ops(model.eval()) == in_training
        assert_same_gradients(expected, step_of(LLAMA, model))


# A kept value is written in place


def _in_place() -> nn.Sequential:
    model: nn.Sequential = built(lambda: nn.Sequential(nn.Linear(16, 16), InPlace(16), InPlace(16)))
    return model


IN_PLACE_PLANS: dict[str, Policy] = {
    "keep-all": KEEP_ALL,
    "full": FULL,
    "nothing-kept": NOTHING_KEPT,
    "keep-products": Only(frozenset({"add_", "sigmoid_", "sin", "cos", "add"})),
    "drop-products": Only(frozenset({"mm"})),
    **{f"random-{seed}": Random(seed) for seed in range(6)},
}


@pytest.mark.parametrize("policy", IN_PLACE_PLANS.values(), ids=IN_PLACE_PLANS)
def test_kept_value_is_written_with_recollect(policy: Policy) -> None:
    model = _in_place()
    expected = gradients(model, rows(), mean_square)
    with apply_policy(model, IN_PLACE_LAYERS, policy):
        assert_same_gradients(expected, gradients(model, rows(), mean_square))
