"""Model providers in the style of Megatron-Bridge: set fields on a provider, then let it build and plan the model.

Only `provide`, `plan` and `apply` import PyTorch.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.megatron.compile import megatron_plan
from recollect.integrations.megatron.rules import RecomputeConfig, refuse_not_yet
from recollect.integrations.megatron.settings import TrainingSetting
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.warning import warn_user

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from recollect.engine.placed_forward import Applied
    from recollect.lab.models.gpt import GPTModel
    from recollect.plans.plan import Plan

_PARALLEL = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("context_parallel_size", "expert_tensor_parallel_size"),
)
# Fields of the provider itself, with Megatron-Bridge's defaults except for the padding of the vocabulary (128 there).
_OWN: dict[str, Any] = {"seq_length": 1024, "make_vocab_size_divisible_by": 1, "bf16": False, "fp16": False}
_OWN |= {"context_parallel_size": 1, "expert_tensor_parallel_size": 1}
# Kernels and dtypes that configurations of Megatron-Bridge choose; here PyTorch's kernels are used in any case.
_WITHOUT_EFFECT = (
    *("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm"),
    *("apply_rope_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
    *("cross_entropy_fusion_impl", "moe_permute_fusion"),
    *("attention_softmax_in_fp32", "params_dtype", "pipeline_dtype", "autocast_dtype", "use_cpu_initialization"),
)
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


class GPTModelProvider(SimpleNamespace):
    """A model, its recompute settings and its training setting, with the field names of Megatron-Bridge.

    Its fields are those of `TransformerConfig`, `RecomputeConfig` and `TrainingSetting`, and `seq_length`,
    `make_vocab_size_divisible_by` and `bf16`. Set them in any order; `finalize`, which `provide` and `plan` call, checks that
    they fit together. Unknown fields raise, where Megatron-Bridge would silently ignore a misspelt one. Subclasses set defaults
    as class attributes.

    Example:
        >>> import torch
        >>> provider = GPTModelProvider(
        ...     num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, seq_length=32
        ... )
        >>> provider.recompute_granularity = "selective"
        >>> provider.recompute_modules = ["core_attn", "mlp"]
        >>> model = provider.provide()
        >>> tokens = torch.randint(256, (2, 33))
        >>> batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        >>> with provider.apply(model, batch):
        ...     model(**batch).loss.backward()
        >>> provider.recompute_granularty = "full"
        Traceback (most recent call last):
        AttributeError: GPTModelProvider.recompute_granularty: got 'full', but there is no such field. Did you mean ...
    """

    config: ClassVar[TransformerConfig | None] = None
    """A configuration whose fields are the defaults of a subclass; a subclass with a `size` has the one of that name."""

    def __init_subclass__(cls, size: str | None = None) -> None:
        if size is not None:
            cls.config = NAMED_CONFIGS[size]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{name: getattr(type(self), name, value) for name, value in self._defaults().items()})
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            near = difflib.get_close_matches(name, vars(self), n=1)
            hint = f"Did you mean {near[0]}?" if near else "docs/megatron_flags.md lists them."
            raise AttributeError(
                f"{type(self).__name__}.{name}: got {value!r}, but there is no such field. {hint}", name=name, obj=self
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        defaults = GPTModelProvider._defaults()
        changed = (f"{name}={value!r}" for name, value in vars(self).items() if value != defaults[name])
        return f"{type(self).__name__}({', '.join(changed)})"

    def transformer_config(self) -> TransformerConfig:
        missing = [name for name in _REQUIRED if getattr(self, name) is None]
        if missing:
            raise ConfigError(
                settings=dict.fromkeys(missing), reason="a model needs them", advice=f"Set {' and '.join(missing)}."
            )
        values = self._values(TransformerConfig)
        step = self.make_vocab_size_divisible_by
        values["vocab_size"] = -(-self.vocab_size // step) * step
        # Megatron's field holds a function; use its name.
        name = getattr(self.activation_func, "__name__", self.activation_func)
        values["activation_func"] = "gelu_tanh" if name == "fast_gelu" else name
        return TransformerConfig(**values)

    def recompute_config(self) -> RecomputeConfig:
        return RecomputeConfig(**self._values(RecomputeConfig))

    def training_setting(self) -> TrainingSetting:
        return TrainingSetting(**self._values(TrainingSetting))

    def finalize(self) -> None:
        """Check all fields together; they may still be changed afterwards, and are then checked again."""
        config = self.transformer_config()
        if config.position_embedding_type == "learned_absolute" and self.seq_length > config.max_position_embeddings:
            raise ConfigError(
                settings={"seq_length": self.seq_length, "max_position_embeddings": config.max_position_embeddings},
                reason="a learned position embedding has no row for the last tokens",
                advice="Lower seq_length or raise max_position_embeddings.",
            )
        if self.fp16:
            raise NotYetError(settings={"fp16": True}, needs="loss scaling", advice="Set bf16 instead.")
        ignored = [name for name in _WITHOUT_EFFECT if getattr(self, name) is not None]
        if ignored:
            warn_user(f"without effect here: {', '.join(ignored)}; kernels are PyTorch's.", ConfigWarning)
        recompute, setting = self.recompute_config(), self.training_setting()
        recompute.check(setting)
        refuse_not_yet(recompute, setting)

    def provide(self) -> GPTModel:
        """Build the model on the default device, with fp32 weights, and bf16 activations if `bf16` is set."""
        import torch

        from recollect.lab.models.gpt import GPTModel

        self.finalize()
        sizes = {name: getattr(self, name) for name in _PARALLEL if getattr(self, name) != 1}
        if sizes:
            raise NotYetError(settings=sizes, needs="models on more than one device", advice="Set it to 1.")
        return GPTModel(self.transformer_config(), compute_dtype=torch.bfloat16 if self.bf16 else None)

    def plan(
        self, model: nn.Module, batch: Any, *, budget: int | str | None = None, optimizer: Optimizer | None = None
    ) -> Plan:
        """Record one step and return its plan: by the provider's recompute settings, or by a memory budget."""
        import recollect

        self.finalize()
        recompute = self.recompute_config()
        if budget is not None and recompute.changed():
            raise ConfigError(
                settings={"budget": budget, **recompute.changed()},
                reason="a budget already decides what to recompute, expected one of them",
                advice="Remove the budget, or set recompute_granularity and the like back to None.",
            )
        profile = recollect.record(model, batch, optimizer=optimizer)
        if budget is not None:
            return recollect.plan(profile, budget)
        return megatron_plan(profile, recompute, self.training_setting())

    def apply(
        self, model: nn.Module, batch: Any, *, budget: int | str | None = None, optimizer: Optimizer | None = None
    ) -> Applied:
        """Make the plan, as `plan` does of the same arguments, and apply it to the model from the next forward on."""
        import recollect

        return recollect.apply(model, self.plan(model, batch, budget=budget, optimizer=optimizer))

    def _values(self, kind: type) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(kind)}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        found: dict[str, Any] = {**_OWN, **dict.fromkeys(_WITHOUT_EFFECT)}
        for kind in (TrainingSetting, RecomputeConfig, TransformerConfig):
            for field in fields(kind):
                found[field.name] = None if field.default is MISSING else field.default
        found["share_embeddings_and_output_weights"] = True
        if cls.config is not None:
            found |= cls.config.given()
            found["seq_length"] = cls.config.max_position_embeddings
        return found


class LlamaModelProvider(GPTModelProvider):
    """A Llama; set its dimensions."""

    normalization = "RMSNorm"
    activation_func = "silu"
    gated_linear_unit = True
    position_embedding_type = "rope"
    add_bias_linear = False
    attention_dropout = 0.0
    hidden_dropout = 0.0
    share_embeddings_and_output_weights = False


class Llama2ModelProvider7B(GPTModelProvider, size="7b"):
    """LLaMA 2 7B."""


class Llama2ModelProvider13B(GPTModelProvider, size="13b"):
    """LLaMA 2 13B."""


class Llama2ModelProvider70B(GPTModelProvider, size="70b"):
    """LLaMA 2 70B."""


class Llama3ModelProvider8B(GPTModelProvider, size="8b"):
    """LLaMA 3 8B."""


class GPTProvider175B(GPTModelProvider, size="gpt3-175b"):
    """GPT-3 175B."""


class MixtralModelProvider8x7B(GPTModelProvider, size="mixtral-8x7b"):
    """Mixtral 8x7B."""


class DeepSeekV3ModelProvider(GPTModelProvider, size="deepseek-v3-671b"):
    """DeepSeek-V3 671B."""
