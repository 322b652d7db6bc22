"""Measure the cost of Megatron's choice: recompute each module with its output kept, and with its output dropped.

    python benchmarks/module_outputs.py

Bytes that a layer keeps, and ops that it runs again, read from a recorded step (`recollect.layer_usage`); no times, so it
does not matter what else runs. What came out: docs/megatron.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import recollect
from flags import MachineFlags, parse
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.integrations.megatron.settings import MEGATRON_OUTPUT
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from tables import markdown

# For each model, a layer that has all modules.
MODULES = {
    "gpt-tiny": ("core_attn", "mlp", "layernorm"),
    "llama-tiny": ("core_attn", "mlp", "layernorm"),
    "mixtral-tiny": ("core_attn", "moe", "moe_act", "layernorm"),
    "deepseek-v3-tiny": ("core_attn", "moe", "moe_act", "shared_experts", "mla_up_proj", "layernorm"),
}
LAYER = "decoder.layers.1"


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags):
    """Shapes."""

    batch_size: int = 2
    """Sequences."""
    seq_length: int = 64
    """Tokens per sequence."""


def rows_of(name: str, core: str, flags: Flags) -> list[tuple[str, ...]]:
    """Return a row for each module of a model."""
    torch.manual_seed(0)
    config = replace(NAMED_CONFIGS[name], core_attention=core)
    if core == "fused":
        # PyTorch's kernel for a CPU has no dropout, and values as wide as queries.
        width = config.qk_head_dim + config.qk_pos_emb_head_dim
        config = replace(config, attention_dropout=0.0, v_head_dim=width)
    model = GPTModel(config).to(torch.bfloat16).train()
    tokens = torch.randint(config.vocab_size, (flags.batch_size, flags.seq_length))
    profile = recollect.record(model, {"tokens": tokens, "labels": tokens})
    unit = flags.batch_size * flags.seq_length * config.hidden_size

    def cells(**fields: object) -> tuple[str, str]:
        plan = megatron_plan(profile, RecomputeConfig(**fields))  # type: ignore[arg-type]
        account = next(a for a in recollect.layer_usage(profile, plan) if a.path == LAYER)
        return f"{(account.kept_bytes - account.generator_bytes) / unit:.1f}", str(account.recomputed_ops)

    rows = [(f"{name}, {core}", "none", "", *cells(), "", "")]
    for module in MODULES[name]:
        chosen = {"recompute_granularity": "selective", "recompute_modules": (module,)}
        kept = cells(**chosen, recompute_discard_outputs=())
        dropped = cells(**chosen, recompute_discard_outputs=(module,))
        rows.append(("", module, MEGATRON_OUTPUT[module].replace("recompute", "drop"), *kept, *dropped))
    return rows


def main(flags: Flags) -> None:
    """Print the table."""
    torch.set_num_threads(flags.threads)
    header = ("model", "module", "Megatron", "kept, output kept", "ops again", "kept, output dropped", "ops again")
    rows = [row for name in MODULES for core in ("fused", "unfused") for row in rows_of(name, core, flags)]
    print(markdown(rows, header))


if __name__ == "__main__":
    main(parse(Flags, __doc__))
