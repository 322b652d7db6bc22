"""TRL's trainers on tiny random models and random words, to be run with a memory budget."""

import copy
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Trainer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import hugging_face_trainers
from hugging_face_trainers import VOCABULARY, case, llama, lora
from metered_trainers import NUM_STEPS, Case

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


def sft(model: Any, **options: Any) -> Trainer:
    return SFTTrainer(model, processing_class=tokenizer(), **options)


def dpo(model: Any, **options: Any) -> Trainer:
    # The copy that TRL would make of a model that is on the Hub.
    others = {} if hasattr(model, "peft_config") else {"ref_model": copy.deepcopy(model)}
    return DPOTrainer(model, processing_class=tokenizer(), **others, **options)


def reward(model: Any, **options: Any) -> Trainer:
    return RewardTrainer(model, processing_class=tokenizer(), **options)


_PLAIN = {"gradient_checkpointing": False, "bf16": False}
_IN_BF16 = {**_PLAIN, "bf16": True}
CASES: dict[str, Case] = {
    **hugging_face_trainers.CASES,
    "SFT in bf16": case(lambda: llama(**_IDS), sft, SFTConfig, answers, **_IN_BF16),
    "SFT of lora": case(lora, sft, SFTConfig, answers, **_PLAIN),
    "DPO": case(lambda: llama(**_IDS), dpo, DPOConfig, pairs, **_PLAIN),
    "DPO of lora": case(lora, dpo, DPOConfig, pairs, **_IN_BF16),
    "Reward": case(classifier, reward, RewardConfig, pairs, **_PLAIN),
}
