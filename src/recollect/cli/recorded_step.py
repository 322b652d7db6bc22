"""Build the training step that a command records or measures, from its flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import recollect
from recollect.cli.commands import ModelStep, RecordedStep
from recollect.errors import RecollectError
from recollect.extras import needed
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.train.optim_flags import OptimFlags
from recollect.lab.train.optimizer_step import build_optimizer, resolve_device
from recollect.profile.profile import Profile
from recollect.recording.step_recording import Gradients


@dataclass(frozen=True, eq=False)
class BuiltStep:
    """Model, batch and optimizer of a training step; the batch is passed to the model as keywords."""

    model: nn.Module
    batch: dict[str, Tensor]
    optimizer: torch.optim.Optimizer


def build_step(flags: ModelStep, device: torch.device, config: TransformerConfig | None = None) -> BuiltStep:
    """Build the step, with the model in training mode and a batch of equal tokens.

    Args:
        flags: model, batch and dtype.
        device: device of model and batch; meta gives shapes without memory.
        config: the model, instead of that of the flags.

    Raises:
        RecollectError: a Hugging Face config cannot be read or used.
    """
    with device:
        if flags.hf_config is not None:
            model = _hugging_face_model(flags.hf_config)
        else:
            model = GPTModel(flags.model.dimensions(seq_length=flags.seq_length) if config is None else config)
        model = model.to(torch.bfloat16 if flags.dtype == "bf16" else torch.float32).train()
        tokens = torch.zeros(flags.num_sequences, flags.seq_length, dtype=torch.int64)
    batch = {"tokens" if flags.hf_config is None else "input_ids": tokens, "labels": tokens}
    return BuiltStep(model, batch, build_optimizer(model, OptimFlags()))


def step_recorder(
    flags: RecordedStep,
    config: TransformerConfig | None = None,
    *,
    holds_output: bool = True,
    gradients: Gradients = "held",
    host_link: bool = False,
) -> Callable[[int], Profile]:
    """Build the step and return a function that records it with a given number of loss chunks.

    Args:
        flags: model, batch, dtype, and the device, or the hardware to model times for.
        config: the model, instead of that of the flags.
        holds_output: whether the loop holds the output; see `recollect.record`.
        gradients: those of the last step; see `recollect.record`.
        host_link: whether to measure copies to host memory and back.

    Raises:
        RecollectError: a Hugging Face config cannot be read or used.
    """
    # A fake step needs only shapes.
    step = build_step(flags, torch.device("meta") if flags.fake else resolve_device(flags.device), config)
    return lambda loss_chunks: recollect.record(
        step.model,
        step.batch,
        optimizer=step.optimizer,
        fake=flags.fake,
        hardware=flags.hardware,
        holds_output=holds_output,
        gradients=gradients,
        loss_chunks=loss_chunks,
        host_link=host_link,
    )


def _hugging_face_model(path: Path) -> nn.Module:
    with needed("transformers", by="--hf-config"):
        import transformers
    if not path.is_file():
        raise RecollectError(f"--hf-config {path}: no such file, expected a config.json of a causal language model.")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(str(path))
        config.use_cache = False  # a key-value cache is for generation; in training it only wastes memory
        builder: Any = transformers.AutoModelForCausalLM
        model: nn.Module = builder.from_config(config)
    except (OSError, ValueError, KeyError) as problem:
        raise RecollectError(
            f"--hf-config {path}: transformers cannot build the model ({str(problem).splitlines()[0]}), expected the "
            f"config.json of a causal language model."
        ) from None
    return model
