"""A model of torchtitan in the order of its trainer: made on meta, a policy applied, made real, initialized, trained."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

from metered_trainers import NUM_STEPS, Case, StepPeaks
from recollect.integrations.torchtitan import MemoryBudget

BATCH, LENGTH = 2, 128


def llama3(*, attention: str = "sdpa") -> Any:
    """Torchtitan's debug model on meta, in three layers; "flex" is as torchtitan makes it, and has no backward on the CPU."""
    config: Any = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:3]
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=LENGTH)
        if attention == "sdpa":
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        return config.build()


def trained(
    policy: ActivationCheckpointing | None,
    loss: BaseLoss.Config,
    accumulation: int = 1,
    peaks: StepPeaks | None = None,
    *,
    compiles: bool = False,
) -> nn.Module:
    """Train as torchtitan's trainer does on one device, without its data, meshes and metrics."""
    torch.manual_seed(0)
    model = llama3()
    if policy is not None:
        policy.apply(model)
    if compiles:
        alone: Any = SimpleNamespace(tp_enabled=False)
        apply_compile(model, compile_config=CompileConfig(enable=True), parallel_dims=alone)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss_fn: Any = loss.build()
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizers: Any = dataclasses.replace(default_adamw(), implementation="for-loop").build(model_parts=[model])
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    if peaks is not None:
        peaks.begin()
    for _ in range(NUM_STEPS):
        optimizers.zero_grad()
        for _ in range(accumulation):
            inputs, labels = (torch.randint(0, 2048, (BATCH, LENGTH)) for _ in range(2))
            pred = model(inputs, positions=positions)
            found, _ = loss_fn(pred, labels, torch.tensor(labels.numel() * accumulation))
            del pred
            found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizers.step()
        if peaks is not None:
            peaks.end()
    return model


def policy(
    budget: int | str, loss: BaseLoss.Config, *, accumulation: int = 1, compiles: bool = False, folder: str = ""
) -> ActivationCheckpointing:
    config = MemoryBudget.Config(
        memory_budget=f"{budget} B" if isinstance(budget, int) else budget,
        local_batch_size=BATCH,
        gradient_accumulation_steps=accumulation,
        loss=loss,
        optimizer=dataclasses.replace(default_adamw(), implementation="for-loop"),
        hardware="cpu",
        engine="compile" if compiles else "tape",
    )
    return config.build(dump_folder=folder)


def _case(loss: BaseLoss.Config, accumulation: int = 1, *, compiles: bool = False) -> Case:
    def run(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
        chosen = None if budget is None else policy(budget, loss, accumulation=accumulation, compiles=compiles)
        return trained(chosen, loss, accumulation, peaks, compiles=compiles), int(chosen is not None)

    return run


CASES: dict[str, Case] = {
    "cross entropy": _case(CrossEntropyLoss.Config()),
    "cross entropy in chunks, two micro-batches": _case(ChunkedLossWrapper.Config(), 2),
    "compiled": _case(CrossEntropyLoss.Config(), compiles=True),
}
