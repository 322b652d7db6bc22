"""Hugging Face's Trainer within a memory budget; LoRA from PEFT in bf16, on random tokens.

pip install recollect[trainers]
python examples/hugging_face_trainer.py
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recollect.integrations.transformers import MemoryBudget


def main() -> None:
    """Train a few steps, and print what was planned."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 512, (64, 128))]
    budget = MemoryBudget(
        "60%"
    )  # of what the first step needs without recompute; on a GPU "22GiB", "90% of the device"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            bf16=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=8,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        Trainer(model, arguments, train_dataset=texts, callbacks=[budget]).train()
    print(budget.attached.report())


if __name__ == "__main__":
    main()
