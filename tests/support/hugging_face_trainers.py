"""Hugging Face's `Trainer`, PEFT's models and TRL's trainers on tiny random models, to be run with a memory budget."""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from metered_trainers import NUM_STEPS, Case, StepPeaks
from recollect.integrations.transformers import MemoryBudget

VOCABULARY = 256


def shard_on_the_cpu(accelerator: Accelerator) -> None:
    """Accelerate takes the plugin on accelerators only, though what it then does works on the CPU."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )


class Sharding(Trainer):
    """Shards as `fsdp=True, fsdp_config={"version": 2}` does on accelerators; Accelerate leaves the plugin out on CPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard_on_the_cpu(self.accelerator)
        self.is_fsdp_enabled = True


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**{**sizes, "vocab_size": VOCABULARY, "attention_dropout": 0.1, **changes})
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, n_positions=128, vocab_size=VOCABULARY)
    return transformers.GPT2LMHeadModel(config)


def lora(base: Any = None, **changes: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1, **changes)
    return peft.get_peft_model(base or llama(), config)


def dora() -> Any:
    return lora(use_dora=True)


def qlora() -> Any:
    """Adapters on a model in 4 bits, made as `from_pretrained` makes it."""
    import peft

    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        quantized = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=how, device_map="cpu")
    return lora(peft.prepare_model_for_kbit_training(quantized, use_gradient_checkpointing=False))


def texts(count: int = 240, length: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: str, kind: type[Any] = TrainingArguments, **changes: Any) -> Any:
    """Arguments of a short training on the CPU that says nothing."""
    quiet = {
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": NUM_STEPS}
    return kind(folder, **{**quiet, **sizes, "learning_rate": 1e-3, **changes})


class Watching(TrainerCallback):
    """Has the peak of each step read."""

    def __init__(self, peaks: StepPeaks) -> None:
        self.peaks = peaks

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.peaks.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.peaks.end()


def _trained(trainer: Trainer) -> nn.Module:
    return trainer.model


def case(
    build: Callable[[], Any],
    kind: Callable[..., Trainer] = Trainer,
    config: type[Any] = TrainingArguments,
    data: Callable[[], Any] = texts,
    result: Callable[[Trainer], nn.Module] = _trained,
    **changes: Any,
) -> Case:
    """Train with a kind of trainer and changed arguments; `result` returns the model of a trainer that is done."""

    def run(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
        transformers.logging.set_verbosity_error()
        callbacks = [] if budget is None else [MemoryBudget(budget)]
        with tempfile.TemporaryDirectory() as folder:
            args = arguments(folder, config, **changes)
            trainer = kind(build(), args=args, train_dataset=data(), callbacks=[*callbacks, Watching(peaks)])
            trainer.train()
        return result(trainer), len(callbacks[0].attached.recorded_steps) if callbacks else 0

    return run


CASES: dict[str, Case] = {
    "llama": case(partial(llama, num_hidden_layers=2)),
    "gpt2 in bf16": case(gpt2, bf16=True),
    "LoRA in bf16": case(lora, bf16=True),
    "DoRA": case(dora),
    "QLoRA": case(qlora),
}
