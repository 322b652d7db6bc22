"""The classic failures of activation checkpointing, each shown once with PyTorch's own and once with recollect.

Rows 1 to 4 and 7 to 10 of the list of failures that users report; rows 5 and 6, which need two processes, are in
`test_failures_parallel.py`. Where a failure can no longer be shown with this version of PyTorch or Transformers, the
docstring says what is seen instead.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hugging_face_flag
from blocks import Experts, InPlace, Stack, built, checkpointed, partitioned
from gradients import assert_same_gradients, call, gradients, loss_of, step_of
from policies import FEW_PLANS, FULL, KEEP_ALL, NOTHING_KEPT, Only, Policy, Random
from recollect.applying import apply_policy
from watch import Watch
from zoo import ZOO

few_plans = pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
LLAMA, PADDED_LLAMA = ZOO["llama"], ZOO["llama_padded"]
EXPERT_LAYERS = ("1", "2")
IN_PLACE_LAYERS = ("1", "2")


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def rows(count: int = 6, width: int = 16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, width)


# Row 1: no input requires a gradient


def _frozen_below_the_head() -> Stack:
    """Only the second linear layer of each block trains; neither the data nor the stem requires a gradient."""
    model: Stack = built(Stack)
    model.requires_grad_(False)
    for block in model.blocks:
        block.down.requires_grad_(True)
    return model


def test_row_1_frozen_base_with_reentrant_checkpoint() -> None:
    model = _frozen_below_the_head()
    with checkpointed(model, model.layers, use_reentrant=True):
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
            loss = mean_square(model(rows()))
        with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
            loss.backward()


@few_plans
def test_row_1_frozen_base_with_recollect(policy: Policy) -> None:
    """Hugging Face's flag works around it: it makes the frozen embedding's output require a gradient. Not so here."""
    model = _frozen_below_the_head()
    expected = gradients(model, rows(), mean_square)
    assert len(expected) == 1 + 2 * len(model.blocks)
    with apply_policy(model, model.layers, policy):
        assert_same_gradients(expected, gradients(model, rows(), mean_square))
        assert not model.stem(rows()).requires_grad


# Row 2: ZeRO-3 with frozen parameters


def _with_frozen_norms() -> Stack:
    model: Stack = built(Stack)
    for block in model.blocks:
        block.norm.requires_grad_(False)
        block.up.requires_grad_(False)
    return model


def _leaves_of_blocks(model: Stack) -> list[nn.Module]:
    """The granularity of DeepSpeed: each linear layer and norm is gathered by itself."""
    return [module for block in model.blocks for module in block.children()]


def test_row_2_partitioned_frozen_parameters_with_checkpoint() -> None:
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
def test_row_2_partitioned_frozen_parameters_with_recollect(policy: Policy) -> None:
    model = _with_frozen_norms()
    expected = gradients(model, rows(), mean_square)
    for modules in (_leaves_of_blocks(model), list(model.blocks)):
        with partitioned(modules), apply_policy(model, model.layers, policy):
            assert_same_gradients(expected, gradients(model, rows(), mean_square))


# Row 3: the recompute routes differently, so that shapes differ


def _experts(*, balances: bool) -> nn.Sequential:
    model: nn.Sequential = built(lambda: nn.Sequential(nn.Linear(16, 16), Experts(16), Experts(16)))
    for layer in (model[1], model[2]):
        layer.balances = balances
    return model


def test_row_3_drifting_routes_with_checkpoint() -> None:
    model = _experts(balances=True)
    with (
        checkpointed(model, EXPERT_LAYERS, use_reentrant=False),
        pytest.raises(CheckpointError, match="different metadata"),
    ):
        gradients(model, rows(), mean_square)


@few_plans
def test_row_3_drifting_routes_with_recollect(policy: Policy) -> None:
    model = _experts(balances=True)
    expected = gradients(model, rows(), mean_square)
    with apply_policy(model, EXPERT_LAYERS, policy):
        assert_same_gradients(expected, gradients(model, rows(), mean_square))


# Row 4: re-running Python changes state twice


def test_row_4_state_changes_twice_with_checkpoint() -> None:
    model = _experts(balances=False)
    expected = gradients(model, rows(), mean_square)
    with checkpointed(model, EXPERT_LAYERS, use_reentrant=False):
        got = gradients(model, rows(), mean_square)
    assert torch.equal(got["buffer 1.loads"], 2 * expected["buffer 1.loads"])
    assert len(model[1].auxiliary_losses) == 1 + 2


@few_plans
def test_row_4_state_changes_once_with_recollect(policy: Policy) -> None:
    model = _experts(balances=False)
    expected = gradients(model, rows(), mean_square)
    with apply_policy(model, EXPERT_LAYERS, policy):
        assert_same_gradients(expected, gradients(model, rows(), mean_square))
    assert len(model[1].auxiliary_losses) == 1 + 1


def test_row_4_cache_grows_twice_with_checkpoint() -> None:
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
def test_row_4_cache_grows_once_with_recollect(policy: Policy) -> None:
    """Transformers' flag avoids this by switching the cache off; here it may stay on."""
    for case in (LLAMA, PADDED_LLAMA):
        model = case.model()
        expected = step_of(case, model)
        with apply_policy(model, case.layers, policy):
            assert_same_gradients(expected, step_of(case, model))
            output = call(model, case.data())
            output.loss.backward()
            assert output.past_key_values.get_seq_length() == 12


# Row 7: which variant?


def scaled_sine(hidden: Tensor, *, scale: float) -> Tensor:
    return (hidden * scale).sin()


def test_row_7_variant_is_guessed_by_checkpoint() -> None:
    """Without `use_reentrant` it warns and takes the reentrant variant: no keyword arguments, no `autograd.grad`."""
    hidden = rows().requires_grad_()
    with (
        pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"),
        pytest.raises(ValueError, match="Unexpected keyword arguments: scale"),
    ):
        checkpoint(scaled_sine, hidden, scale=2.0)


def test_row_7_variant_is_guessed_by_transformers() -> None:
    """Other keyword arguments without it silently replace the default, so that the reentrant variant runs."""
    model = LLAMA.model()
    hugging_face_flag.enable(model, {"preserve_rng_state": True})
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        loss = loss_of(call(model, LLAMA.data()))
    with pytest.raises(
        RuntimeError, match=r"use_reentrant=True, torch\.utils\.checkpoint is incompatible with \.grad\(\)"
    ):
        torch.autograd.grad(loss, [model.model.embed_tokens.weight])


class ScaledSine(nn.Module):
    def forward(self, hidden: Tensor, *, scale: float) -> Tensor:
        return scaled_sine(hidden, scale=scale)


@few_plans
def test_row_7_there_is_no_variant_with_recollect(policy: Policy) -> None:
    hidden = rows().requires_grad_()
    (expected,) = torch.autograd.grad(scaled_sine(hidden, scale=2.0).sum(), hidden)
    model = nn.Sequential(ScaledSine())
    with warnings.catch_warnings(), apply_policy(model, ["0"], policy):
        warnings.simplefilter("error")
        (got,) = torch.autograd.grad(model[0](hidden, scale=2.0).sum(), hidden)
    assert torch.equal(expected, got)


# Row 8: one region around everything saves nothing


def _peak_bytes(model: nn.Module, data: Tensor) -> int:
    with Watch(follows_peak=True) as watch:
        model(data).square().mean().backward()
    return watch.peak_bytes


def test_row_8_one_region_saves_nothing() -> None:
    """The recompute of one big region brings all its values back at once; recompute layer by layer does not."""

    def deep() -> Stack:
        model: Stack = built(lambda: Stack(width=16, depth=12))
        return model

    data = rows(64)
    model = deep()
    plain = _peak_bytes(deep(), data)
    holder = nn.Sequential(model)
    with checkpointed(holder, ["0"], use_reentrant=False):
        assert _peak_bytes(holder, data) > 0.95 * plain
    model = deep()
    with apply_policy(model, model.layers, FULL):
        assert _peak_bytes(model, data) < 0.4 * plain


# Row 9: no effect outside of training mode


def _recomputed_ops(model: nn.Module) -> int:
    with Watch() as watch:
        step_of(LLAMA, model)
    return watch.computing_ops().total()


def test_row_9_evaluation_mode_with_the_flag_of_transformers() -> None:
    model = LLAMA.model()
    plain = _recomputed_ops(model)
    hugging_face_flag.enable(model)
    assert _recomputed_ops(model) > plain
    assert _recomputed_ops(model.eval()) == plain


def test_row_9_evaluation_mode_with_recollect() -> None:
    model = LLAMA.model()
    expected = step_of(LLAMA, model)
    plain = _recomputed_ops(model)
    with apply_policy(model, LLAMA.layers, FULL):
        in_training = _recomputed_ops(model)
        assert in_training > plain
        assert _recomputed_ops(model.eval()) == in_training
        assert_same_gradients(expected, step_of(LLAMA, model))


# Row 10: a kept value is written in place


def _in_place() -> nn.Sequential:
    model: nn.Sequential = built(lambda: nn.Sequential(nn.Linear(16, 16), InPlace(16), InPlace(16)))
    return model


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def test_row_10_kept_value_is_written_with_selective_checkpoint() -> None:
    model = _in_place()
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    with (
        checkpointed(model, IN_PLACE_LAYERS, use_reentrant=False, context_fn=contexts),
        pytest.raises(RuntimeError, match="Tensor cached during selective activation checkpoint has been mutated"),
    ):
        gradients(model, rows(), mean_square)


IN_PLACE_PLANS: dict[str, Policy] = {
    "keep-all": KEEP_ALL,
    "full": FULL,
    "nothing-kept": NOTHING_KEPT,
    "keep-products": Only(frozenset({"add_", "sigmoid_", "sin", "cos", "add"})),
    "drop-products": Only(frozenset({"mm"})),
    **{f"random-{seed}": Random(seed) for seed in range(6)},
}


@pytest.mark.parametrize("policy", IN_PLACE_PLANS.values(), ids=IN_PLACE_PLANS)
def test_row_10_kept_value_is_written_with_recollect(policy: Policy) -> None:
    model = _in_place()
    expected = gradients(model, rows(), mean_square)
    with apply_policy(model, IN_PLACE_LAYERS, policy):
        assert_same_gradients(expected, gradients(model, rows(), mean_square))
