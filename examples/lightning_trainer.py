"""Lightning's Trainer within a memory budget, on random tokens.

pip install recollect[trainers]
python examples/lightning_trainer.py
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from recollect.integrations.lightning import MemoryBudget


class LanguageModel(pl.LightningModule):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss."""
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train a few steps, and print what was planned."""
    torch.manual_seed(0)
    data = DataLoader(torch.randint(0, 512, (64, 128)), batch_size=4)
    budget = MemoryBudget(
        "60%"
    )  # of what the first step needs without recompute; on a GPU "22GiB", "90% of the device"
    trainer = pl.Trainer(
        max_steps=8,
        accumulate_grad_batches=2,
        precision="bf16-mixed",
        callbacks=[budget],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(), data)
    print(budget.attached.report())


if __name__ == "__main__":
    main()
