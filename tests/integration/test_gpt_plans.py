"""GPT and Llama under plans, with fused and unfused core attention: what they hold.

That budgets are kept is in `test_prediction.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from gradients import Step, gradients
from policies import FULL, NOTHING_KEPT
from predictions import loss_of_output
from recollect.applying import apply_policy
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.recording.find_units import find_units
from watch import Watch

every_model = pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
every_core = pytest.mark.parametrize("core", ["fused", "unfused"])


def model_of(name: str, core: Any, **changes: Any) -> GPTModel:
    torch.manual_seed(0)
    changes = {"hidden_dropout": 0.1, "attention_dropout": 0.1, **changes}
    return GPTModel(NAMED_CONFIGS[name].changed(core_attention=core, **changes))


@functools.cache
def batch_of(sequences: int = 2, length: int = 24) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(256, (sequences, length))
    return {"tokens": tokens, "labels": tokens.roll(-1, dims=1)}


def step_of(model: nn.Module, seed: int = 0) -> Step:
    return gradients(model, batch_of(), loss_of_output, seed)


def unit_paths(model: nn.Module) -> list[str]:
    return [unit.path for unit in find_units(model)]


@every_model
@every_core
def test_dropout_draws_in_every_step(name: str, core: str) -> None:
    """Without this, equal bits would say nothing about dropout."""
    model = model_of(name, core)
    steps = [step_of(model, seed)["loss"] for seed in (0, 1)]
    assert not torch.equal(*steps)


@every_model
@every_core
def test_full_recompute_keeps_the_inputs_of_the_layers_only(name: str, core: str) -> None:
    """What one more layer adds: its input, and with dropout the states of the generator that draw its masks again."""
    kept = []
    for num_layers in (2, 3):
        model = model_of(name, core, num_layers=num_layers, hidden_dropout=0.0, attention_dropout=0.0)
        layers = [path for path in unit_paths(model) if ".layers." in path]
        with apply_policy(model, layers, FULL), Watch() as watch:
            loss = model(**batch_of()).loss
            kept.append(watch.live_bytes())
        loss.backward()
        del loss
    assert kept[1] - kept[0] == 2 * 24 * 64 * 4


@every_model
def test_unfused_attention_holds_its_probabilities_until_a_plan_drops_them(name: str) -> None:
    """One head and pair of positions: a probability, and with dropout its mask and what is left of it."""
    kept = {}
    for core in ("fused", "unfused"):
        model = model_of(name, core, attention_dropout=0.0, hidden_dropout=0.0)
        batch = batch_of(length=96)
        with Watch() as watch:
            loss = model(**batch).loss
            kept[core] = watch.live_bytes()
        del loss
        with apply_policy(model, unit_paths(model), NOTHING_KEPT), Watch() as watch:
            loss = model(**batch).loss
            kept[f"{core}, nothing kept"] = watch.live_bytes()
        del loss
    probabilities = 4 * 2 * 4 * 96 * 96 * 4  # layers, sequences, heads, pairs of positions, bytes
    assert kept["unfused"] - kept["fused"] > 0.8 * probabilities
    assert kept["unfused, nothing kept"] == kept["fused, nothing kept"]
