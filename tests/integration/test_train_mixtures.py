"""Training Mixtral and DeepSeek-V3 by the loop: budgets change no loss, a killed run goes on, biases move after each step."""

from typing import Any

import pytest
import torch

from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.train.exchange import Exchange
from recollect.lab.train.trained import Trained


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randint(256, (2, 17))
    return tokens[:, :-1], tokens[:, 1:]


def test_a_step_updates_biases_once_for_all_its_micro_batches() -> None:
    torch.manual_seed(0)
    model = GPTModel(NAMED_CONFIGS["deepseek-v3-tiny"])
    router = model.decoder.layers[1].mlp.router
    counted = torch.zeros(16, dtype=torch.int64)

    def count(_module: Any, _inputs: Any, routing: Any) -> None:
        counted.add_(routing.statistics.tokens_per_expert)

    router.register_forward_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Trained(model, model, optimizer, Exchange()).step([_batch(0), _batch(1)], clip_norm=1.0)
    expected = 0.001 * (counted.float().mean() - counted).sign()
    assert torch.equal(router.expert_bias, expected)
    assert not router.tokens_per_expert.any()


def test_validation_counts_the_next_token_only_and_drops_nothing() -> None:
    torch.manual_seed(0)
    config = NAMED_CONFIGS["deepseek-v3-tiny"].changed(hidden_dropout=0.5)
    model = GPTModel(config)
    trained = Trained(model, model, torch.optim.SGD(model.parameters()), Exchange())
    first = trained.validation_loss([_batch(0), _batch(1)])
    assert first == trained.validation_loss([_batch(0), _batch(1)])
    assert model.training
    model.eval()
    assert first == pytest.approx(sum(model(*_batch(seed)).lm_loss.item() for seed in (0, 1)) / 2)
