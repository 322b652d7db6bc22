"""`attach` takes what Megatron's `get_model` and `get_megatron_optimizer` return: the real ones, in two processes."""

import importlib.util
from pathlib import Path

import pytest
import torch.distributed as dist

from forked_processes import run_forked
from metered_processes import needs_meter
from rank_processes import run_ranks
from tiers import long_but

PROGRAM = Path(__file__).parents[1] / "support/megatron_ranks.py"
pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]


_KINDS = ("sequence", "tensor", "data", "pipeline", "tensor, latent", "data, sharded", "pipeline, experts")


@needs_meter
@pytest.mark.parametrize("kind", long_but(("sequence", "pipeline"), _KINDS))
def test_gradients_weights_and_peaks_are_as_without_a_budget_and_as_under_its_own_recompute(kind: str) -> None:
    run_ranks(2, PROGRAM, kind)


_SETTINGS = """
import sys
sys.path.append(sys.argv[1])
import megatron_core_shim as shim
shim.install()
from megatron_core_models import CASES, Setting, megatron_subject
import recollect
from recollect.integrations.megatron import RecomputeConfig
from recollect.plans.action import Action

subject = megatron_subject(CASES["deepseek-v3"], Setting(name="none"))
profile = recollect.record(subject.model, None, step=lambda: subject.forward().backward())
for name in ("mla_up_proj", "moe_act"):
    plan = recollect.megatron_plan(profile, RecomputeConfig(recompute_granularity="selective", recompute_modules=[name]))
    actions = plan.units["decoder.layers.1"].actions
    print(name, *sorted(value for value, action in actions.items() if action is Action.RECOMPUTE))
"""


def test_modules_of_a_setting_are_found_in_its_own_layers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_SETTINGS, encoding="utf-8")
    done = run_forked(program, Path(__file__).parents[2] / "benchmarks")
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines() if line[:1] == "m"}
    linear = "LinearWithGradAccumulationAndAsyncCommunication"
    # As Megatron's `qkv_up_proj_and_rope_apply`: the two products, the rotation, and what puts the halves together.
    assert {f"self_attention.{part}.{linear}" for part in ("linear_q_up_proj", "linear_kv_up_proj")} < found[
        "mla_up_proj"
    ]
    assert {"self_attention.cat", "self_attention.cos", "self_attention.mul"} < found["mla_up_proj"]
    assert not any("core_attention" in value or "down_proj" in value for value in found["mla_up_proj"])
    assert {"mlp.experts.silu", "mlp.experts.mul"} <= found["moe_act"]
    assert not any("grouped_mm" in value for value in found["moe_act"])
