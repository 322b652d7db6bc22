"""The same training in the loop of each tool: plainly, with the tool's own checkpointing, or within a budget."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import recollect
from metered_trainers import StepPeaks

NUM_STEPS, BATCH, LENGTH = 30, 4, 128

Way = str | int
"""'plain', 'own', or the bytes of a budget."""


@dataclass(frozen=True)
class Tool:
    """A tool, by the package whose version counts, and its training."""

    package: str
    train: Callable[[Way, StepPeaks], nn.Module]


def _budget(way: Way) -> int | None:
    return way if isinstance(way, int) else None


def _llama(**changes: Any) -> Any:
    from hugging_face_trainers import llama

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
    return llama(**{**sizes, "attention_dropout": 0.0, **changes})


def _lora() -> Any:
    import peft

    return peft.get_peft_model(_llama(), peft.LoraConfig(r=8, target_modules="all-linear"))


def _attached(way: Way, model: Any, optimizer: Any) -> None:
    if isinstance(way, int):
        recollect.attach(model, optimizer, way, log=lambda line: None)


def _bare(way: Way, peaks: StepPeaks) -> nn.Module:
    from hugging_face_trainers import texts

    model = _llama().train()
    if way == "own":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _attached(way, model, optimizer)
    rows = texts(BATCH * NUM_STEPS, LENGTH)
    peaks.begin()
    for step in range(NUM_STEPS):
        batch = torch.stack([row["input_ids"] for row in rows[BATCH * step : BATCH * (step + 1)]])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.end()
    return model


def _accelerate(way: Way, peaks: StepPeaks) -> nn.Module:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from hugging_face_trainers import texts

    model = _llama().train()
    if way == "own":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerator = Accelerator(cpu=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data: Any = DataLoader(texts(BATCH * NUM_STEPS, LENGTH), batch_size=BATCH)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    _attached(way, model, optimizer)
    peaks.begin()
    for batch in data:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        peaks.end()
    return model


def _deepspeed(way: Way, peaks: StepPeaks) -> nn.Module:
    """ZeRO-2, and as its own the checkpoint that DeepSpeed has for layers that are called with keyword arguments."""
    import deepspeed_engines  # isort: skip, sets the variables that DeepSpeed reads
    import deepspeed

    from hugging_face_trainers import texts
    from recollect.integrations.deepspeed import initialize

    model = _llama().train()
    if way == "own":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = deepspeed.checkpointing.non_reentrant_checkpoint
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {"model": model, "optimizer": optimizer, "config": deepspeed_engines.config(2)}
    if isinstance(way, int):
        engine, *_ = initialize(**given, memory_budget=way)
    else:
        engine, *_ = deepspeed.initialize(**given)
    rows = texts(BATCH * NUM_STEPS, LENGTH)
    peaks.begin()
    for step in range(NUM_STEPS):
        batch = torch.stack([row["input_ids"] for row in rows[BATCH * step : BATCH * (step + 1)]])
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        peaks.end()
    if isinstance(way, int):
        engine.memory_budget.remove()
    engine.destroy()
    return model


def _trainer(build: Callable[[], Any], kind: str = "") -> Callable[[Way, StepPeaks], nn.Module]:
    def train(way: Way, peaks: StepPeaks) -> nn.Module:
        from transformers import Trainer, TrainingArguments

        from hugging_face_trainers import arguments, texts, trained

        options: dict[str, Any] = {"gradient_accumulation_steps": 1, "gradient_checkpointing": way == "own"}
        make: Callable[[list[Any]], Any]
        with tempfile.TemporaryDirectory() as folder:
            if kind == "SFT":
                from trl import SFTConfig, SFTTrainer

                from trl_trainers import tokenizer, words

                args = arguments(folder, SFTConfig, bf16=False, **options)
                from datasets import Dataset

                data = Dataset.from_dict({"text": words(BATCH * NUM_STEPS, LENGTH - 4, 0)})

                def make(callbacks: list[Any]) -> Any:
                    return SFTTrainer(
                        build(), args=args, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
                    )
            else:
                args = arguments(folder, TrainingArguments, **options)

                def make(callbacks: list[Any]) -> Any:
                    rows = texts(BATCH * NUM_STEPS, LENGTH)
                    return Trainer(build(), args, train_dataset=rows, callbacks=callbacks)

            return trained(make, _budget(way), peaks)[0]

    return train


def _lightning(way: Way, peaks: StepPeaks) -> nn.Module:
    from torch.utils.data import DataLoader

    from hugging_face_trainers import texts
    from lightning_trainers import Automatic, Watching, trainer
    from recollect.integrations.lightning import MemoryBudget

    module = Automatic()
    module.model = _llama()
    if way == "own":
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    module.train()
    callbacks = [MemoryBudget(way)] if isinstance(way, int) else []
    data = DataLoader(texts(BATCH * NUM_STEPS, LENGTH), batch_size=BATCH)
    with tempfile.TemporaryDirectory() as folder:
        trainer(folder, *callbacks, Watching(peaks)).fit(module, data)
    return module


def _diffusers(name: str) -> Callable[[Way, StepPeaks], nn.Module]:
    def train(way: Way, peaks: StepPeaks) -> nn.Module:
        import diffusers_loops

        model = getattr(diffusers_loops, name)(large=True)
        if way == "own":
            model.enable_gradient_checkpointing()
        diffusers_loops.train(model, _budget(way), "no", peaks)
        return model

    return train


def _torchtitan(own: str) -> Callable[[Way, StepPeaks], nn.Module]:
    def train(way: Way, peaks: StepPeaks) -> nn.Module:
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

        import torchtitan_models

        torchtitan_models.BATCH = BATCH
        loss = CrossEntropyLoss.Config()
        policy: Any = None
        if way == "own":
            kind = FullAC if own == "full" else SelectiveAC
            policy = kind.Config().build(dump_folder="")
        elif isinstance(way, int):
            policy = torchtitan_models.policy(way, loss)
        return torchtitan_models.trained(policy, loss, 1, peaks)

    return train


TOOLS = {
    "bare loop": Tool("transformers", _bare),
    "Accelerate": Tool("accelerate", _accelerate),
    "HF Trainer": Tool("transformers", _trainer(_llama)),
    "PEFT LoRA": Tool("peft", _trainer(_lora)),
    "TRL SFT": Tool("trl", _trainer(lambda: _llama(pad_token_id=0, bos_token_id=1, eos_token_id=2), "SFT")),
    "Lightning": Tool("lightning", _lightning),
    "DeepSpeed": Tool("deepspeed", _deepspeed),
    "diffusers UNet": Tool("diffusers", _diffusers("unet")),
    "diffusers DiT": Tool("diffusers", _diffusers("transformer")),
    "torchtitan full": Tool("torchtitan", _torchtitan("full")),
    "torchtitan selective": Tool("torchtitan", _torchtitan("selective")),
}
