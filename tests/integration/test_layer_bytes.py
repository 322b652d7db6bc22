"""Bytes that a layer of a layout keeps under Megatron's settings, against formulas: the paper's, and our own for other models.

V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, table 2, for GPT in 16
bits with dropout and attention op by op. s: tokens, b: sequences, h: hidden size, a: heads, t: ranks of tensor parallelism.
The formulas for a Llama and a mixture count in the same way what Megatron-LM at d98e8a64 saves. Each difference has a name, and
its own formula: everything is equal to the byte. States of random generators are left out.
"""

import functools
from typing import Any

import pytest

from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.lab.models.architectures import llama_config, mixtral_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.cluster_step import ClusterStep, record_stages
from recollect.lab.parallel.layout import DeviceLayout
from recollect.planning.explain import LayerUsage, layer_usage
from recollect.profile.profile import Profile
from tiers import long_but

S, B, H, A = 64, 2, 128, 8
TOKENS = S * B
# Of a Llama: channels of the MLP or of an expert, and key and value channels.
F, KV = 320, H
# Of a mixture: experts, and how many a token goes to.
EXPERTS, CHOICES = 8, 2

# A LayerNorm's mean and deviation, which the paper leaves out, have 2 bytes each on a CPU.
STATISTIC = 2
# On a CPU an RMSNorm goes op by op: its input and its normalised input are saved in fp32; a fused kernel saves its input.
NORM_EXTRA = 4 + 4 - 2
# A SwiGLU goes op by op: the activated gate, and with a router's weights the product with it, are results that it saves.
SWIGLU_EXTRA, WEIGHTED_SWIGLU_EXTRA = 2, 4

CONFIGS = {
    "gpt": TransformerConfig(
        num_layers=3,
        hidden_size=H,
        num_attention_heads=A,
        vocab_size=64,
        max_position_embeddings=S,
        core_attention="unfused",
    ),
    **{
        f"gpt, {core}, no dropout": TransformerConfig(
            num_layers=3,
            hidden_size=H,
            num_attention_heads=A,
            vocab_size=64,
            max_position_embeddings=S,
            core_attention=core,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        for core in ("unfused", "fused")
    },
    "llama": llama_config(
        num_layers=3, hidden_size=H, ffn_hidden_size=F, num_attention_heads=A, num_query_groups=8, vocab_size=64
    ),
    "grouped": llama_config(
        num_layers=3, hidden_size=H, ffn_hidden_size=F, num_attention_heads=A, num_query_groups=2, vocab_size=64
    ),
    "mixture": mixtral_config(
        num_layers=3, hidden_size=H, ffn_hidden_size=F, num_attention_heads=A, num_query_groups=8, vocab_size=64
    ),
    "deepseek": NAMED_CONFIGS["deepseek-v3-tiny"].changed(num_layers=3, moe_layer_freq=[0, 1, 1]),
}

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Ranks of tensor parallelism, and whether these split sequences, too.
LAYOUTS = [(1, False), (4, False), (4, True), (2, False), (8, False), (2, True), (8, True)]
on_layouts = pytest.mark.parametrize(("t", "sequence"), long_but([(1, False), (4, True)], LAYOUTS, are_rows=True))
on_few_layouts = pytest.mark.parametrize(
    ("t", "sequence"), long_but([(2, True)], [(1, False), (2, False), (2, True)], are_rows=True)
)


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


@functools.cache
def profile_of(kind: str, **sizes: Any) -> Profile:
    step = ClusterStep(
        config=CONFIGS[kind],
        layout=DeviceLayout(**sizes),
        cluster=cluster_of(find_hardware("H100")),
        micro_batch_size=B,
        seq_length=S,
    )
    return record_stages(step).profiles[0]


def layer(kind: str, t: int, sequence: bool, fields: dict[str, Any], **sizes: Any) -> LayerUsage:
    """The last layer but one: what the last one returns, the final norm holds, too."""
    profile = profile_of(kind, tensor_model_parallel_size=t, sequence_parallel=sequence, **sizes)
    plan = megatron_plan(profile, RecomputeConfig(**fields))
    return [usage for usage in layer_usage(profile, plan) if ".layers." in usage.path][-2]


def kept(kind: str, t: int, sequence: bool, fields: dict[str, Any], **sizes: Any) -> int:
    usage = layer(kind, t, sequence, fields, **sizes)
    return usage.kept_bytes - usage.generator_bytes


@on_layouts
def test_the_papers_formulas(t: int, sequence: bool) -> None:
    sbh, attention = TOKENS * H, 5 * A * S * S * B
    u = t if sequence else 1  # ranks that share what is between the matrices
    # The paper counts 1 byte an element of a dropout's mask, which a CPU writes in the dtype of the input.
    sizes = [n for name, n in layer("gpt", t, sequence, {}).kept if name.startswith(("div_", "native_dropout"))]
    assert len(sizes) == 2
    extra = sum(sizes) - 2 * sbh // u
    assert extra in (0, 2 * sbh // u)
    masks = extra + 2 * 2 * STATISTIC * TOKENS // u
    attention_mask = A * S * S * B // t if extra else 0
    paper = 34 * sbh // t if sequence else 10 * sbh + 24 * sbh // t
    assert kept("gpt", t, sequence, {}) == paper + attention // t + masks + attention_mask
    assert kept("gpt", t, sequence, selective("core_attn")) == paper + masks
    assert kept("gpt", t, sequence, FULL) == 2 * sbh // u
    # Of the other modules the paper says nothing; its own terms tell. The MLP keeps its input, 2 sbh, and its mask.
    assert kept("gpt", t, sequence, selective("core_attn", "mlp")) == paper - 16 * sbh // t + masks
    norms = 2 * 2 * sbh // u + 2 * 2 * STATISTIC * TOKENS // u
    assert kept("gpt", t, sequence, selective("core_attn", "layernorm")) == paper - norms + masks


def test_without_dropout_or_with_one_kernel_the_formula_loses_terms() -> None:
    """34 - 2 for two masks of the residual stream; 5 - 3 for dropped probabilities, or a kernel's sum for each head."""
    sbh, statistics = TOKENS * H, 2 * 2 * STATISTIC * TOKENS
    assert kept("gpt, unfused, no dropout", 1, False, {}) == 32 * sbh + 2 * A * S * S * B + statistics
    fused = kept("gpt, fused, no dropout", 1, False, {})
    assert fused == 32 * sbh + 4 * A * TOKENS + statistics
    assert kept("gpt, fused, no dropout", 1, False, selective("core_attn")) == fused - 4 * A * TOKENS


def norm(u: int) -> int:
    return TOKENS * (2 * H + 4 + NORM_EXTRA * H + 2 * H) // u


def attention(t: int, kv: int = KV) -> int:
    """Queries, keys and values; the kernel's result, which a product reads, and its sum for each head."""
    return TOKENS * (2 * H + 2 * 2 * kv + 2 * H + 4 * A) // t


def mlp(t: int) -> int:
    """Gate and up, and their product, which a product of matrices reads."""
    return TOKENS * (4 + 2 + SWIGLU_EXTRA) * F // t


@on_layouts
def test_a_llama(t: int, sequence: bool) -> None:
    """That is, without the extras, bh(12 + 4 kv/h + 6 f/h) s with kv channels of keys, and f of the MLP, and 4a + 8 a token."""
    u = t if sequence else 1
    plain = 2 * norm(u) + attention(t) + mlp(t)
    assert kept("llama", t, sequence, {}) == plain
    assert kept("llama", t, sequence, selective("core_attn")) == plain - TOKENS * 4 * A // t
    assert kept("llama", t, sequence, selective("mlp")) == plain - mlp(t)
    # The residual stream stays, in 16 bits.
    stream = TOKENS * 2 * H // u
    assert kept("llama", t, sequence, selective("layernorm")) == plain - 2 * (norm(u) - stream)
    assert kept("llama", t, sequence, FULL) == stream


@on_few_layouts
def test_grouped_queries(t: int, sequence: bool) -> None:
    """Two groups of four heads: keys and values have a quarter of the channels."""
    u = t if sequence else 1
    assert kept("grouped", t, sequence, {}) == 2 * norm(u) + attention(t, kv=H // 4) + mlp(t)


@on_few_layouts
def test_context_parallelism_divides_all(t: int, sequence: bool) -> None:
    """Keys and values, too, which attention gathers again. On a CPU kernels need masks, which are left out here."""
    u, ranks = t if sequence else 1, 2

    def without_masks(fields: dict[str, Any]) -> int:
        usage = layer("llama", t, sequence, fields, context_parallel_size=ranks)
        # Nor the seeds that kernels of a GPU return.
        return sum(nbytes for name, nbytes in usage.kept if ".where" not in name and nbytes > 64)

    # Each of the two chunks has a result of its own, which is then a part of one; Megatron has that one alone.
    result = TOKENS * 2 * H // t // ranks
    plain = (2 * norm(u) + attention(t) + mlp(t)) // ranks
    assert without_masks({}) == plain + result
    assert without_masks(selective("core_attn")) == plain - TOKENS * 4 * A // t // ranks
    assert without_masks(FULL) == TOKENS * 2 * H // u // ranks


# Of a token, in fp32 or int64: logits and scores; choices, their weights, and their order, there and back.
ROUTER = 2 * 4 * EXPERTS + (8 + 4 + 8 + 8 + 4 + 8) * CHOICES
# Shares of the experts, and where their rows end.
COUNTS = 2 * 4 * EXPERTS
# What cannot run again: choices, two orders, and which expert has been chosen; and how many tokens each has.
ROUTES, ROUTE_COUNTS = 3 * 8 * CHOICES + EXPERTS, 8 * EXPERTS


@on_layouts
def test_a_mixture(t: int, sequence: bool) -> None:
    """Each rank has some channels of all experts, and runs all rows of a sequence through them.

    Megatron routes its part of a sequence, and gathers rows: under sequence parallelism the router takes t times less there.
    """
    u = t if sequence else 1
    rows, activation = TOKENS * 2 * CHOICES * H, TOKENS * CHOICES * F * (2 + WEIGHTED_SWIGLU_EXTRA) // t
    outside = 2 * norm(u) + attention(t)
    plain = outside + rows + TOKENS * CHOICES * F * 4 // t + activation + TOKENS * ROUTER + COUNTS
    assert kept("mixture", t, sequence, {}) == plain
    assert kept("mixture", t, sequence, selective("moe_act")) == plain - activation
    routes = TOKENS * ROUTES + ROUTE_COUNTS
    assert kept("mixture", t, sequence, selective("moe")) == outside + routes
    assert kept("mixture", t, sequence, FULL) == TOKENS * 2 * H // u + routes


@pytest.mark.parametrize("whole", [False, True])
def test_expert_parallelism_keeps_as_many_rows(whole: bool) -> None:
    """With whole experts each rank routes its part, and has 1 of t of the rows; rows that come are put in order once more."""
    t, ranks = 4, 4
    sizes = {"expert_tensor_parallel_size": 1} if whole else {"data_parallel_size": ranks}
    tokens = TOKENS // t if whole else TOKENS
    inside = TOKENS * CHOICES * F * (4 + 2 + WEIGHTED_SWIGLU_EXTRA) // t
    experts = tokens * (2 * CHOICES * H + ROUTER + 2 * 8 * CHOICES) + inside
    counts = 4 * EXPERTS + 4 * EXPERTS // ranks
    expected = 2 * norm(t) + attention(t) + experts + counts
    assert kept("mixture", t, True, {}, expert_model_parallel_size=ranks, **sizes) == expected


@pytest.mark.parametrize(
    "modules", [(), ("core_attn",), ("mla_up_proj",), ("mlp",), ("moe",), ("moe_act", "shared_experts"), ("layernorm",)]
)
@pytest.mark.parametrize(
    "sizes", long_but([{}], [{}, {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}]), ids=str
)
def test_nothing_gathered_is_kept(modules: tuple[str, ...], sizes: dict[str, int]) -> None:
    """Nor what the router casts; latent attention gathers latents, and the part of the keys that has positions."""
    ranks = {"data_parallel_size": 2} if "expert_model_parallel_size" in sizes else {}
    usage = layer("deepseek", 2, True, selective(*modules) if modules else {}, **sizes, **ranks)
    assert usage.replayed_collectives["all_gather_into_tensor"] >= 3
    names = {name for name, _ in usage.kept}
    assert not [name for name in names if "all_gather" in name or "router._to_copy" in name]
    # Nor what puts the parts of a batch in order.
    assert names.isdisjoint(f"{module}.cat" for module in ("mlp", "self_attention", "self_attention.qkv_up_proj"))
