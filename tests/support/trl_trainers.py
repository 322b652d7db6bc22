"""TRL's trainers on tiny random models and random words, to be run with a memory budget."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import Trainer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import hugging_face_trainers
from hugging_face_trainers import VOCABULARY, arguments, llama, lora, trained
from metered_trainers import NUM_STEPS, Case, StepPeaks

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_WORDS = [f"w{number}" for number in range(VOCABULARY - len(_SPECIAL))]
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *_WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), _SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def words(count: int, length: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, len(_WORDS), (count, length), generator=generator)
    return [" ".join(_WORDS[number] for number in row) for row in numbers]


def classifier() -> Any:
    torch.manual_seed(0)
    config = llama().config
    config.num_labels, config.pad_token_id = 1, 0
    return transformers.LlamaForSequenceClassification(config)


def pairs(length: int = 32) -> Dataset:
    asked, better, worse = (words(8 * NUM_STEPS, length, seed) for seed in range(3))
    return Dataset.from_dict(
        {"prompt": asked, "chosen": [f" {b}" for b in better], "rejected": [f" {w}" for w in worse]}
    )


def answers() -> Dataset:
    return Dataset.from_dict({"text": words(240, 60, 0)})


def _case(
    build: Callable[[], Any], kinds: tuple[type[Any], type[Any]], data: Callable[[], Dataset], **changes: Any
) -> Case:
    trainer, config = kinds

    def run(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
        with tempfile.TemporaryDirectory() as folder:
            args = arguments(folder, config, gradient_checkpointing=False, **changes)

            def make(callbacks: list[Any]) -> Trainer:
                model = build()
                # The copy that TRL would make of a model that is on the Hub.
                others = {"ref_model": build()} if trainer is DPOTrainer and not hasattr(model, "peft_config") else {}
                options = {
                    "args": args,
                    "train_dataset": data(),
                    "processing_class": tokenizer(),
                    "callbacks": callbacks,
                }
                return trainer(model, **options, **others)

            return trained(make, budget, peaks)

    return run


CASES: dict[str, Case] = {
    **hugging_face_trainers.CASES,
    "SFT in bf16": _case(lambda: llama(**_IDS), (SFTTrainer, SFTConfig), answers, bf16=True),
    "SFT of lora": _case(lora, (SFTTrainer, SFTConfig), answers, bf16=False),
    "DPO": _case(lambda: llama(**_IDS), (DPOTrainer, DPOConfig), pairs, bf16=False),
    "DPO of lora": _case(lora, (DPOTrainer, DPOConfig), pairs, bf16=True),
    "Reward": _case(classifier, (RewardTrainer, RewardConfig), pairs, bf16=False),
}
