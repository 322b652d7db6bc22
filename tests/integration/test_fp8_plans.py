"""Recompute under FP8 changes no bit of gradients, histories and scales, also where what others do changes them silently."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from blocks import Computes
from fp8_models import (
    KINDS,
    LAYERS,
    RECIPES,
    Order,
    batches,
    different,
    first_difference,
    model_of,
    plans_of,
    step,
)
from policies import FULL, KEEP_ALL
from recollect.applying import apply_policy
from recollect.errors import MutatedValueError
from recollect.lab.models.fp8 import Fp8Product
from recollect.lab.models.fp8_casts import DelayedScaling
from recollect.lab.train.model_flags import Fp8Flags
from recollect.plans.action import Action
from tiers import long, long_but
from training_runs import losses, run

ROWS = [(kind, recipe, order) for kind in KINDS for recipe in RECIPES for order in ("in flight", "one by one")]
# Models with experts have dense products, too.
QUICK = [row for row in ROWS if row[2] == "in flight" and (row[0] == "experts" or row[1] == "delayed")]


@pytest.mark.parametrize(("kind", "recipe", "order"), long_but(QUICK, ROWS, are_rows=True))
def test_steps_under_plans_leave_what_plain_steps_leave(kind: str, recipe: str, order: Order) -> None:
    plans = plans_of(kind, model_of(kind, recipe), 1)
    count = 4 if recipe == "delayed" else 2  # micro-batches
    assert first_difference(kind, recipe, [plans[0], plans[-2], plans[-1]], 3, order, count) == []


@pytest.mark.long
@pytest.mark.parametrize("order", ["in flight", "one by one"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_300_steps_under_many_plans_leave_what_plain_steps_leave(kind: str, recipe: str, order: Order) -> None:
    plans = plans_of(kind, model_of(kind, recipe), 50)
    assert first_difference(kind, recipe, plans, 300, order) == []


@pytest.mark.parametrize("recipe", ["delayed", *long([name for name in RECIPES if name != "delayed"])])
def test_a_graph_that_backward_runs_over_twice(recipe: str) -> None:
    """Histories of gradients roll twice then, with a plan and without one."""
    plain, planned = model_of("experts", recipe), model_of("experts", recipe)
    torch.manual_seed(0)
    expected = step(plain, batches(plain, 2), "in flight", retain=True)
    torch.manual_seed(0)
    with apply_policy(planned, LAYERS, FULL):
        assert different(expected, step(planned, batches(planned, 2), "in flight", retain=True)) == []


# What is kept


def test_casts_count_as_one_byte_and_a_plan_chooses_whether_to_keep_them() -> None:
    model = model_of("dense", "tensorwise", hidden_size=128, ffn_hidden_size=512)
    batch = batches(model, 1)[0]
    profile = recollect.record(model, batch, loss_fn=lambda out: out.loss)
    graph = profile.graph_of(next(call for call in profile.calls if call.path == LAYERS[0]))
    saved = {value.name: value.nbytes for value in graph.values if value.saved and ".fp8." in value.name}
    tokens = batch[0].numel()
    weights = {"self_attention.linear_qkv": 128 * 384, "self_attention.linear_proj": 128 * 128}
    weights |= {"mlp.linear_fc1": 128 * 512, "mlp.linear_fc2": 512 * 128}
    for name, weight in weights.items():
        width = 512 if name == "mlp.linear_fc2" else 128
        assert saved[f"{name}.fp8._to_copy"] == tokens * width
        assert saved[f"{name}.fp8._to_copy#1"] == weight
    # What 16 bits would save of the same inputs is not saved, too.
    inputs = (
        "input_layernorm.native_layer_norm.0",
        "pre_mlp_layernorm.native_layer_norm.0",
        "mlp.activation_func.gelu",
    )
    assert not any(value.saved for value in graph.values if value.name in inputs)
    plans = [recollect.plan(profile, f"{percent}%") for percent in (100, 96, 93)]
    dropped = [
        {
            f"{path} {name}"
            for path, unit in plan.units.items()
            for name, action in unit.actions.items()
            if is_cast(name, action)
        }
        for plan in plans
    ]
    assert not dropped[0] and 0 < len(dropped[1]) < 2 * 2 * len(weights), dropped
    for plan in plans:
        report = recollect.verify(model, batch, plan, loss_fn=lambda out: out.loss, time=False)
        assert report.equal and abs(report.plan_peak_bytes - (plan.predicted_peak_bytes or 0)) < 2048


def is_cast(name: str, action: Action) -> bool:
    return action is Action.RECOMPUTE and re.search(r"\.fp8\._to_copy(#1)?$", name) is not None


# What somebody writes between forward and backward


@pytest.mark.parametrize("role", ["input", "weight"])
def test_a_scale_that_somebody_writes_after_forward_changes_no_gradient(role: str) -> None:
    """Forward has a copy of it, which a plan keeps, because forward itself writes the next one."""
    found = []
    for policy in (KEEP_ALL, FULL):
        model = model_of("dense", "delayed")
        with apply_policy(model, LAYERS, policy):
            torch.manual_seed(0)
            loss = model(*batches(model)[0]).loss
            for product in model.modules():
                if isinstance(product, Fp8Product):
                    product.scalings[role].multiplier.mul_(3)
            loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert different(*found) == []


def test_a_frozen_scale_that_somebody_writes_is_an_error_that_names_the_op() -> None:
    model = model_of("dense", "delayed").eval()  # where forward only reads the scales
    with apply_policy(model, LAYERS, FULL):
        loss = model(*batches(model)[0]).loss
        scaling = model.get_submodule("decoder.layers.1.mlp.linear_fc2.fp8.scalings.input")
        assert isinstance(scaling, DelayedScaling)
        scaling.multiplier.mul_(3)
        with pytest.raises(
            MutatedValueError,
            match=r"used by clone in decoder.layers.1.mlp.linear_fc2.fp8.scalings.input, was",
        ):
            loss.backward()


def test_a_scale_that_a_users_hook_updates_in_backward_is_an_error_that_names_the_op() -> None:
    """A layer of somebody's own that reads its scale where it is, of which it is told in a backward hook."""
    own_scale = Computes(
        lambda self, x: ((x * self.scale).sigmoid() * self.scale).tanh() @ self.weight,
        weight=nn.Parameter(torch.eye(16)),
        scale=torch.ones(()),
    )
    model = nn.Sequential(own_scale, nn.Linear(16, 16))
    model[1].register_full_backward_hook(lambda *_: model[0].scale.mul_(2) and None)  # type: ignore[func-returns-value]
    with apply_policy(model, ["0"], FULL):
        loss = model(torch.randn(4, 16, requires_grad=True)).square().sum()
        with pytest.raises(MutatedValueError, match=r"shape \[\], used by mul in 0, was changed in place 1 time"):
            loss.backward()


# Training runs


@pytest.mark.long
def test_a_run_goes_on_from_its_checkpoint_with_its_histories(tmp_path: Path) -> None:
    flags = Fp8Flags(fp8_format="hybrid", fp8_amax_history_len=3, fp8_amax_compute_algo="max")
    settings: dict[str, Any] = {"eight_bits": flags, "seq_length": 32, "memory_budget": "90%", "checkpoint_every": 2}
    settings["lr_decay_style"] = "constant"  # which does not depend on the number of steps
    run(tmp_path, **settings, steps=6, run_dir=tmp_path / "whole")
    run(tmp_path, **settings, steps=4)
    run(tmp_path, **settings, steps=6, resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
