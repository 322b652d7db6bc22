"""A loop may run forward and backward inside the optimizer's step, in a closure."""

import pytest
import torch

import recollect
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel


def test_optimizer_state_counts_where_the_step_runs_in_a_closure() -> None:
    torch.manual_seed(0)
    model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (2, 16))

    def closure() -> torch.Tensor:
        loss = model(tokens=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        return loss

    with recollect.attach(model, optimizer, "100%", log=lambda _: None) as attached:
        for _ in range(2):
            optimizer.step(closure)
        state_bytes = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
        # In the first step the counts of steps, four bytes each, are made out of sight.
        for step in attached.planned:
            assert step.profile.persistent["optimizer_state"] == pytest.approx(state_bytes, rel=1e-3)
