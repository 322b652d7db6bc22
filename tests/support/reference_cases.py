"""The reference models, small siblings of those that people train, with all that draws random numbers or counts switched on.

Every question that is asked of the models of the zoo can be asked of these, too.
"""

from dataclasses import replace
from typing import Any

import torch

from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from zoo import Case

# DeepSeek has one dense layer, three with experts, and one that predicts the token after the next.
SIZES = ("gpt-tiny", "llama-tiny", "mixtral-tiny", "deepseek-v3-tiny")
FURTHER: dict[str, dict[str, Any]] = {
    "mixtral-tiny loop": {"moe_grouped_gemm": False, "moe_layer_freq": 2, "add_bias_linear": True},
    "mixtral-tiny sequence loss": {"core_attention": "unfused", "moe_router_load_balancing_type": "seq_aux_loss"},
    "deepseek-v3-tiny two depths": {"mtp_num_layers": 2},
    "deepseek-v3-tiny loss": {"core_attention": "unfused", "moe_aux_loss_coeff": 0.1},
}
IN_BF16 = ("gpt-tiny unfused", "llama-tiny fused", "mixtral-tiny unfused", "deepseek-v3-tiny fused")


def reference_case(name: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> Case:
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    config = replace(NAMED_CONFIGS[name.split(maxsplit=1)[0]], **{**rates, **changes})
    if name.split()[1] == "fused":
        # What PyTorch's kernel for a CPU asks for: no dropout, and values as wide as queries.
        width = config.qk_head_dim + config.qk_pos_emb_head_dim
        config = replace(config, attention_dropout=0.0, v_head_dim=width)

    def batch() -> dict[str, Any]:
        tokens = torch.randint(0, config.vocab_size, (2, 12))
        return {"tokens": tokens, "labels": tokens}

    layers = tuple(f"decoder.layers.{i}" for i in range(config.num_layers))
    return Case(
        name, lambda: GPTModel(config, compute_dtype=dtype), batch, layers, lambda output: output.loss, is_random=True
    )


REFERENCE_CASES = {
    **{
        f"{size} {core}": reference_case(f"{size} {core}", {"core_attention": core})
        for size in SIZES
        for core in ("fused", "unfused")
    },
    **{name: reference_case(name, changes) for name, changes in FURTHER.items()},
    **{
        f"{name} bf16": reference_case(f"{name} bf16", {"core_attention": name.split()[1]}, torch.bfloat16)
        for name in IN_BF16
    },
}
