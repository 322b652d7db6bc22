"""Megatron's module sets on Hugging Face's models, against the same sets done by wrapping modules in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import recollect
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from watch import Watch

pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# What stands for mla_up_proj there recomputes the whole attention, so the two cannot be compared.
SETS = {
    "dense": ("core_attn", "mlp", "layernorm", "core_attn+mlp", "mlp+layernorm"),
    "moe": ("core_attn", "layernorm", "moe_act", "moe", "moe+layernorm", "moe_act+layernorm"),
    "mla": ("shared_experts", "moe_act", "moe"),
}
# What topk and sort return is kept here, and chosen again there.
CHOICES_FRACTION = 0.02


def measured(step: Any) -> tuple[int, int]:
    """Bytes that are alive when forward has ended, and ops of the whole step."""
    step.clear()
    with Watch() as forward:
        loss = step.model(**step.batch).loss
        kept_bytes = forward.live_bytes()
    loss.backward()
    with Watch() as whole:
        step.run()
    return kept_bytes, whole.computing_ops().total()


@pytest.mark.parametrize("model", SETS)
def test_as_many_bytes_saved_and_no_more_ops(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from megatron_peers import _PARTS, _InTurn
    from subject import Step, StepFlags

    sizes = StepFlags(hidden_size=64, num_layers=3, num_heads=2, vocab_size=64, batch_size=2, seq_length=32, threads=1)
    step = Step(sizes, model)
    profile, (plain_bytes, _) = step.record(), measured(step)
    for names in SETS[model]:
        modules = names.split("+")
        config = RecomputeConfig(recompute_granularity="selective", recompute_modules=modules)
        with recollect.apply(step.model, megatron_plan(profile, config)):
            kept_bytes, num_ops = measured(step)
        with _InTurn(step, [_PARTS[name] for name in modules]).on():
            peer_bytes, peer_num_ops = measured(step)
        least_saved = (1 - CHOICES_FRACTION if "moe" in modules else 1) * (plain_bytes - peer_bytes)
        assert plain_bytes - kept_bytes >= least_saved, names
        assert num_ops <= peer_num_ops, names
