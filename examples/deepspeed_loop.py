"""DeepSpeed's loop within a memory budget: ZeRO-2 on random tokens. On the CPU unless DS_ACCELERATOR says otherwise.

pip install recollect[trainers]
python examples/deepspeed_loop.py
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# What the launchers `deepspeed` and `torchrun` set.
alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
for name, value in alone.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from recollect.integrations.deepspeed import initialize  # noqa: E402


def main() -> None:
    """Train a few steps, and print what was planned."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        # Buckets are as large as they are asked to be, 1 GB by default, however small the model.
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
        "zero_allow_untested_optimizer": True,
        # Of what the first step needs without recompute; on a GPU "22GiB", "90% of the device".
        "recollect": {"memory_budget": "85%"},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, _, _, _ = initialize(model=model, optimizer=optimizer, config=config)
    for tokens in torch.randint(0, 512, (16, 4, 128), device=engine.device):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    print(engine.memory_budget.report())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
