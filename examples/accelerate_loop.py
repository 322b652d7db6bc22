"""A loop of Accelerate within a memory budget, in one process or in several, which then run one plan.

pip install recollect[trainers]
accelerate launch examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import recollect


def main() -> None:
    """Train a few steps, and print what was planned."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    # "60%": of what the first step needs without recompute; on a GPU "22GiB", "90% of the device"
    attached = recollect.attach(model, optimizer, "60%")
    for _ in range(8):
        tokens = torch.randint(0, 256, (4, 64), device=accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(attached.report())


if __name__ == "__main__":
    main()
