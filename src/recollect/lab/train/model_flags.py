"""Flags that describe the model, named as in Megatron's `pretrain_gpt`. Imports no torch."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.train.optim_flags import at_least, within

if TYPE_CHECKING:  # which cannot read names from a table
    SizeName = str
else:
    SizeName = Literal[tuple(NAMED_CONFIGS)]

_HEAD_CHANNELS = 128  # of LLaMA, GPT-3 and Mixtral


@dataclass(frozen=True, kw_only=True)
class ExpertFlags:
    """A mixture of experts."""

    num_experts: int | None = None
    moe_layer_freq: str | None = None
    """N: every Nth layer has experts; or a 1 (experts) or 0 (dense) for each layer, such as "[0]*3+[1]*58"."""
    moe_ffn_hidden_size: int | None = None
    """Width inside one expert; default: --ffn-hidden-size."""
    moe_router_topk: int | None = None
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_pre_softmax: FlagCreatePairsOff[bool] = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: FlagCreatePairsOff[bool] = False
    moe_router_bias_update_rate: float | None = None
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] | None = None
    moe_aux_loss_coeff: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_grouped_gemm: FlagCreatePairsOff[bool] = False


@dataclass(frozen=True, kw_only=True)
class LatentFlags:
    """Latent attention and multi-token prediction."""

    multi_latent_attention: FlagCreatePairsOff[bool] = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Fp8Flags:
    """Products in 8 bits."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Multiply in 8 bits, all e4m3, or gradients e5m2; embedding, norms, attention, router and LM head are unchanged."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """How values are scaled before they are cast; default, as in Megatron: delayed."""
    fp8_margin: int | None = None
    fp8_amax_history_len: int | None = None
    fp8_amax_compute_algo: Literal["most_recent", "max"] | None = None
    fp8_emulated: FlagCreatePairsOff[bool] = False
    """Multiply cast values in fp32 even if the device has no kernel for the recipe; on a CPU this always happens."""
    first_last_layers_bf16: FlagCreatePairsOff[bool] = False
    num_layers_at_start_in_bf16: int | None = None
    """How many of the first; default: 1."""
    num_layers_at_end_in_bf16: int | None = None
    """How many of the last; default: 1."""


# The names are headings of --help.
_Experts = Annotated[OmitArgPrefixes[ExpertFlags], arg(name="experts", prefix_name=False)]
_Latent = Annotated[OmitArgPrefixes[LatentFlags], arg(name="latent attention", prefix_name=False)]
_Fp8 = Annotated[OmitArgPrefixes[Fp8Flags], arg(name="fp8", prefix_name=False)]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The model: a named one with changes, or, with --num-layers and --hidden-size, one as Megatron's pretrain_gpt builds."""

    size: SizeName | None = None
    """A named model; the flags below override its dimensions. Default: demo."""
    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: Annotated[int | None, arg(aliases=("--intermediate-size",))] = None
    num_attention_heads: Annotated[int | None, arg(aliases=("--num-heads",))] = None
    """Query heads; required in Megatron, here the default without --size is one per 128 channels."""
    group_query_attention: FlagCreatePairsOff[bool] = False
    """Share keys and values among groups of query heads: --num-query-groups of them, or one."""
    num_query_groups: Annotated[int | None, arg(aliases=("--num-kv-heads",))] = None
    kv_channels: int | None = None
    max_position_embeddings: int | None = None
    """Longest sequence; default without --size: --seq-length."""
    vocab_size: int | None = None
    """Rows of the embedding; default: the tokenizer's vocabulary."""
    make_vocab_size_divisible_by: int = 1
    """Pad the vocabulary to a multiple of this; Megatron's default is 128."""
    position_embedding_type: Literal["learned_absolute", "rope"] | None = None
    use_rotary_position_embeddings: FlagCreatePairsOff[bool] = False
    """Old spelling of --position-embedding-type rope."""
    rotary_base: float | None = None
    rotary_interleaved: FlagCreatePairsOff[bool] = False
    normalization: Literal["LayerNorm", "RMSNorm"] | None = None
    norm_epsilon: Annotated[float | None, arg(aliases=("--layernorm-epsilon",))] = None
    swiglu: FlagCreatePairsOff[bool] = False
    """A gated MLP with SiLU."""
    openai_gelu: FlagCreatePairsOff[bool] = False
    """GELU by its tanh approximation, as in GPT-2."""
    disable_bias_linear: FlagCreatePairsOff[bool] = False
    """No biases in linear layers."""
    add_qkv_bias: FlagCreatePairsOff[bool] = False
    """A bias for queries, keys and values even with --disable-bias-linear."""
    qk_layernorm: FlagCreatePairsOff[bool] = False
    """Norms of each query and key head."""
    untie_embeddings_and_output_weights: FlagCreatePairsOff[bool] = False
    """Give the LM head its own matrix."""
    tie_embeddings: Annotated[bool | None, arg(aliases=("--share-embeddings-and-output-weights",))] = None
    """Use the word embedding as LM head; default without --size, as in Megatron: True."""
    hidden_dropout: float | None = None
    attention_dropout: float | None = None
    init_method_std: float | None = None
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] | None = None
    """unfused and local: softmax(QK^T)V op by op, with every intermediate a separate value; others: PyTorch's fused kernel."""
    use_flash_attn: FlagCreatePairsOff[bool] = False
    """Old spelling of --attention-backend flash."""
    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """local: --attention-backend unfused, unless one is given; all kernels are PyTorch's in any case."""
    experts: _Experts = field(default_factory=ExpertFlags)
    latent: _Latent = field(default_factory=LatentFlags)
    eight_bits: _Fp8 = field(default_factory=Fp8Flags)

    def __post_init__(self) -> None:
        self._refuse_both("tie_embeddings", "untie_embeddings_and_output_weights")
        at_least(
            self, 1, "make_vocab_size_divisible_by", "vocab_size", "ffn_hidden_size", "kv_channels", "num_query_groups"
        )
        within("num_layers", self.num_layers or 1, 1, 10_000)  # building more takes hours
        if self.use_rotary_position_embeddings and self.position_embedding_type == "learned_absolute":
            self._refuse_both("use_rotary_position_embeddings", "position_embedding_type")
        if self.use_flash_attn and self.attention_backend in ("unfused", "local"):
            self._refuse_both("use_flash_attn", "attention_backend")
        self.dimensions()

    @property
    def is_megatrons(self) -> bool:
        """Whether the model is given by dimensions, as for `pretrain_gpt`, instead of by name."""
        return self.size is None and self.num_layers is not None and self.hidden_size is not None

    def dimensions(self, vocab_size: int | None = None, *, seq_length: int | None = None) -> TransformerConfig:
        """Return the configuration: the named model, or `pretrain_gpt`'s defaults, with the flags' changes."""
        changes = self.changes(vocab_size)
        if not self.is_megatrons:
            return NAMED_CONFIGS[self.size or "demo"].changed(**changes)
        return TransformerConfig(**{**self._megatrons_defaults(seq_length), **changes})

    def changes(self, vocab_size: int | None = None) -> dict[str, Any]:
        """Return the fields of `TransformerConfig` that the flags set."""
        changes: dict[str, Any] = {}
        for flags in (self, self.experts, self.latent, self.eight_bits):
            for flag in fields(flags):
                name, value = FIELD_OF_FLAG.get(flag.name, flag.name), getattr(flags, flag.name)
                if value == flag.default:
                    continue  # not given
                if flag.name in _SWITCHES:
                    changes |= _SWITCHES[flag.name]
                elif name in _FIELDS:
                    changes[name] = value
        if "moe_layer_freq" in changes:
            changes["moe_layer_freq"] = parse_layer_freq(changes["moe_layer_freq"])
        if self.group_query_attention:
            changes.setdefault("num_query_groups", 1)
        if self.attention_backend is not None:
            changes["core_attention"] = "unfused" if self.attention_backend in ("unfused", "local") else "fused"
        elif self.transformer_impl == "local" and not self.use_flash_attn:
            changes["core_attention"] = "unfused"
        rows = self.vocab_size or vocab_size
        if rows is not None:
            step = self.make_vocab_size_divisible_by
            changes["vocab_size"] = -(-rows // step) * step
        return changes

    def _megatrons_defaults(self, seq_length: int | None) -> dict[str, Any]:
        """Return the defaults of `pretrain_gpt` (megatron/training/arguments.py at d98e8a64)."""
        hidden_size = self.hidden_size or 0
        heads = hidden_size // _HEAD_CHANNELS if hidden_size % _HEAD_CHANNELS == 0 else 1
        return {
            "num_attention_heads": heads,
            "vocab_size": 256,
            "share_embeddings_and_output_weights": True,
            # Three matrices of 8/3 of the width have as many parameters as two of 4 times the width.
            "ffn_hidden_size": int(4 * hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * hidden_size,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            **({} if seq_length is None else {"max_position_embeddings": seq_length}),
        }

    def _refuse_both(self, first: str, second: str) -> None:
        values = [getattr(self, name) for name in (first, second)]
        if all(values):
            said = " and ".join(f"{name} = {value}" for name, value in zip((first, second), values, strict=True))
            raise ValueError(f"{said}: got both, expected one of them. Remove one.")


FIELD_OF_FLAG = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "tie_embeddings": "share_embeddings_and_output_weights",
    "fp8_format": "fp8",
}
# The flags about the vocabulary are more than its size.
_FIELDS = {field.name for field in fields(TransformerConfig)} - {"vocab_size"}
_SWITCHES: dict[str, dict[str, Any]] = {
    "swiglu": {"gated_linear_unit": True, "activation_func": "silu"},
    "openai_gelu": {"activation_func": "gelu_tanh"},
    "use_rotary_position_embeddings": {"position_embedding_type": "rope"},
    "disable_bias_linear": {"add_bias_linear": False},
    "untie_embeddings_and_output_weights": {"share_embeddings_and_output_weights": False},
}


def parse_layer_freq(text: str) -> int | Sequence[int]:
    """Parse Megatron's --moe-layer-freq: a number, or an expression of lists with a 0 or 1 for each layer."""
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        value = None
    is_list = isinstance(value, list) and all(item in (0, 1) for item in value) and len(value) <= _MOST_LAYERS
    if not is_list and not (isinstance(value, int) and value >= 1):
        raise ValueError(
            f"moe_layer_freq: got {text!r}, expected a number of at least 1 or a list of 0 and 1 for each layer, "
            f"such as [0]*3+[1]*58."
        )
    return value


_MOST_LAYERS = 10_000


def _evaluate(node: ast.expr) -> Any:
    """Evaluate sums and multiples of lists of numbers; raise ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= _MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        times, items = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(items, list) and times * len(items) <= _MOST_LAYERS:
            return times * items
    raise ValueError(ast.dump(node))
