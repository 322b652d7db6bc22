"""A loop of your own over a model of Hugging Face within a memory budget, on random tokens.

pip install recollect[trainers]
python examples/hugging_face_loop.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recollect.integrations.transformers import enable_memory_budget


def main() -> None:
    """Train a few steps, and print what was planned."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    # In place of model.gradient_checkpointing_enable(); on a GPU "22GiB", "90% of the device".
    attached = enable_memory_budget(model, optimizer, "60%")
    for _ in range(8):
        tokens = torch.randint(0, 512, (4, 128), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(attached.report())


if __name__ == "__main__":
    main()
