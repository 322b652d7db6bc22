"""Hugging Face's, TRL's and Lightning's trainers in two processes over gloo, to be run with a memory budget."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"})
# As torchrun sets it, by which Lightning knows that the processes are there.
os.environ["TORCHELASTIC_RUN_ID"] = "none"

import torch  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import Trainer  # noqa: E402
from trl import SFTConfig  # noqa: E402

import hugging_face_trainers  # noqa: E402
import lightning_trainers  # noqa: E402
from hugging_face_trainers import Sharding, arguments, llama, lora, texts  # noqa: E402
from lightning_trainers import Automatic, loader, trainer  # noqa: E402
from metered_trainers import NUM_STEPS, SHARDED_STEPS, Case  # noqa: E402
from recollect.integrations.lightning import MemoryBudget as LightningBudget  # noqa: E402
from recollect.integrations.transformers import MemoryBudget  # noqa: E402
from recollect.ranks import members  # noqa: E402
from trl_trainers import answers, sft  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))


def gathered(trained_model: nn.Module, whole: nn.Module) -> nn.Module:
    """Return a model with trained weights, of this process's shards if there are some."""
    with torch.no_grad():
        for own, its in zip(whole.parameters(), trained_model.parameters(), strict=True):
            own.copy_(its.full_tensor() if hasattr(its, "full_tensor") else its)
    return whole


def _wrapped_in(wrapper: type[Any], trainer: Trainer) -> nn.Module:
    assert isinstance(trainer.model_wrapped, wrapper)
    return gathered(trainer.model, llama())


_hugging_face = partial(hugging_face_trainers.case, llama, data=partial(texts, 320))


# What gloo's threads release late is little beside a step of so many.
Automatic.num_layers = 4


class Sharded(Automatic):
    """Shards itself, as `ModelParallelStrategy` asks for."""

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def _all_of(module: Automatic) -> nn.Module:
    return gathered(module, Automatic())


# Of eight rows, four in each process.
_lightning = partial(lightning_trainers.case, result=_all_of, devices=2)
CASES: dict[str, Case] = {
    "Hugging Face DDP": _hugging_face(
        result=partial(_wrapped_in, DistributedDataParallel), max_steps=NUM_STEPS, gradient_accumulation_steps=2
    ),
    "Hugging Face FSDP2": _hugging_face(
        Sharding, result=partial(_wrapped_in, FSDPModule), max_steps=SHARDED_STEPS, gradient_accumulation_steps=1
    ),
    "SFT of LoRA DDP": hugging_face_trainers.case(
        lora, sft, SFTConfig, answers, gradient_checkpointing=False, bf16=False, gradient_accumulation_steps=1
    ),
    "Lightning DDP": _lightning(Automatic, strategy=lambda: "ddp"),
    "Lightning FSDP2": _lightning(
        Sharded, SHARDED_STEPS, strategy=lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    ),
}


def _train(*callbacks: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Trainer(llama(), arguments(folder, max_steps=2), train_dataset=texts(32), callbacks=[*callbacks]).train()


def _fit(*callbacks: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer(folder, *callbacks, devices=2, strategy="ddp").fit(Automatic(), loader(2))


def _one_without() -> None:
    """Has to be the last one: the process without goes on until the other has ended."""
    members._PATIENCE_AFTER_BARRIER_S = 2.0  # type: ignore[misc]
    _train(*([] if RANK else [MemoryBudget("80%")]))


MISTAKES: dict[str, Callable[[], None]] = {
    "two budgets in Hugging Face": lambda: _train(MemoryBudget(("80%", "90%")[RANK])),
    "two budgets in Lightning": lambda: _fit(LightningBudget(("80%", "90%")[RANK])),
    "one without a budget": _one_without,
}
