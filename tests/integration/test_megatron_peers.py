"""Megatron's settings against their own recompute: peaks and ops."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import recollect
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from tiers import long_but
from watch import Watch

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


@pytest.mark.parametrize("model", long_but(("moe",), SETS))
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


_BESIDE = """
import sys
from dataclasses import replace
sys.path.append(sys.argv[1])
import megatron_core
megatron_core.start()
small = replace(megatron_core.CASES["mixtral"], seq_length=32)
for row in megatron_core.compare(small, ["full uniform 1", "selective moe_act"]):
    behind = {name: row.behind(name) for name in megatron_core.PEAK_RATIO}
    # In layers as small as these a product takes less time than to watch one more layer.
    behind["same peak"] = [what for what in behind["same peak"] if what != "more FLOP again"]
    print(f"{row.setting} | {row.sides['same setting'].ops_again > 0} | {row.failures} | {behind}")
"""


@pytest.mark.long  # A model of megatron-core, under three settings and three plans at their peaks.
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatrons_own_model_peaks_no_higher_than_under_its_own_settings() -> None:
    # Not forked from a server, whose processes may not fork any themselves.
    done = subprocess.run([sys.executable, "-c", _BESIDE, BENCHMARKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    behind = "{} | {'same setting': [], 'same peak': []}"
    rows = [f"none | False | {behind}", f"full uniform 1 | True | {behind}", f"selective moe_act | True | {behind}"]
    assert [line for line in done.stdout.splitlines() if " | " in line] == rows
