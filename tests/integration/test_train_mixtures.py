"""Training Mixtral and DeepSeek-V3 by the loop: budgets change no loss, a killed run goes on, biases move after each step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recollect.engine.content import has_same_bits
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.train.exchange import Exchange
from recollect.lab.train.session import open_session
from recollect.lab.train.trained import Trained
from training_runs import config, losses, run

SIZE: dict[str, Any] = {"seq_length": 128, "batch_size": 4, "steps": 5, "validate_every": 3, "accumulation": 2}


@pytest.mark.long  # `test_mixture_steps.py` trains both under plans; this is the command's own loop.
@pytest.mark.parametrize("size", ["mixtral-tiny", "deepseek-v3-tiny"])
def test_a_budget_changes_neither_losses_nor_biases(size: str, tmp_path: Path) -> None:
    plain = run(tmp_path, run_dir=tmp_path / "plain", size=size, **SIZE)
    assert plain.measured_peak_bytes is not None
    budget_bytes = plain.measured_peak_bytes * 7 // 10
    lean = run(tmp_path, run_dir=tmp_path / "lean", size=size, memory_budget=str(budget_bytes), **SIZE)
    assert losses(tmp_path / "lean") == losses(tmp_path / "plain")
    assert [r.validation_loss for r in lean.records] == [r.validation_loss for r in plain.records]
    assert lean.measured_peak_bytes is not None
    assert lean.measured_peak_bytes <= budget_bytes
    states = [
        open_session(config(tmp_path, run_dir=tmp_path / name, size=size, resume=True, **SIZE)).model.state_dict()
        for name in ("plain", "lean")
    ]
    assert all(has_same_bits(states[0][name], states[1][name]) for name in states[0])
    biases = [tensor for name, tensor in states[0].items() if name.endswith("expert_bias")]
    assert len(biases) == (4 if size == "deepseek-v3-tiny" else 0)
    # Five steps of 0.001 each, up or down.
    assert all({abs(round(1000 * bias)) for bias in each.tolist()} <= {0, 1, 2, 3, 4, 5} for each in biases)
    assert all(each.any() for each in biases)


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
