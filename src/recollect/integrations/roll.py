"""Applies the changes of ROLL's model provider and strategies to a Hugging Face model in training.

`recollect.integrations.megatron.roll` reads their settings, like those of its Megatron strategies; `roll_plan` there is
the same as a plan for a recorded step.
"""

from contextlib import ExitStack
from typing import Any

from torch import nn

from recollect.applying import apply_policy
from recollect.arguments import check_kind
from recollect.engine.placed_forward import Applied
from recollect.engine.policy import DropAll
from recollect.errors import ConfigError
from recollect.integrations.megatron.roll import RollCheckpointing
from recollect.integrations.trainers import CacheOff
from recollect.recording.find_units import find_units

__all__ = ["RollApplied", "apply_roll_checkpointing"]


class RollApplied(ExitStack):
    """ROLL's switches in effect on a model. `remove()`, or the end of a with-block, ends them.

    Attributes:
        applied: the layers that are recomputed; None if gradient checkpointing is disabled.
        settings: ROLL's arguments for Hugging Face: `gradient_checkpointing_kwargs`, if it is enabled, and `use_cache`.
    """

    def __init__(self, applied: Applied | None, cache_off: CacheOff | None, settings: dict[str, Any]) -> None:
        super().__init__()
        self.applied = applied
        self.settings = settings
        for handle in (applied, cache_off):
            if handle is not None:
                self.callback(handle.remove)

    def remove(self) -> None:
        """Leave the model as it was; do nothing the second time."""
        self.close()


def apply_roll_checkpointing(
    model: nn.Module, checkpointing: RollCheckpointing | None = None, *, use_cache: bool = False
) -> RollApplied:
    """Recompute each layer of a model in backward, and switch its cache off, as ROLL does unless told otherwise.

    Whichever of PyTorch's implementations the two switches choose, the layers of a model of Hugging Face are recomputed on the
    tape, with the same gradients as both and the limits of neither. `use_cache` leaves the cache of keys and values on, which
    ROLL passes as False when it trains; it only takes memory there. The result ends both; it is also a context manager.

    Raises:
        ArgumentError: the model is not a module.
        ConfigError: the model has no configuration for the automatic choice to read.
        AlreadyAppliedError: the model already recomputes.
        UnsupportedModelError: there are no layers in it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        >>> with apply_roll_checkpointing(model) as roll:
        ...     roll.settings, model.config.use_cache
        ({'gradient_checkpointing_kwargs': {'use_reentrant': False}, 'use_cache': False}, False)
    """
    check_kind("integrations.roll.apply_roll_checkpointing(model)", "model", model, nn.Module, "torch.nn.Module")
    chosen = checkpointing or RollCheckpointing()
    settings: dict[str, Any] = {"use_cache": use_cache}
    applied = None
    if not chosen.disable_gradient_checkpointing:
        config = getattr(model, "config", None)
        if config is None and chosen.gradient_checkpointing_use_reentrant is None:
            raise ConfigError(
                settings={"gradient_checkpointing_use_reentrant": None},
                reason=f"{type(model).__name__} has no `config`, which says whether there are experts",
                advice="Set it to True or False, or pass the model of Hugging Face itself.",
            )
        settings = {"gradient_checkpointing_kwargs": {"use_reentrant": chosen.use_reentrant(config)}, **settings}
        layers = [unit.path for unit in find_units(model) if unit.is_layer]
        applied = apply_policy(model, layers, DropAll())
    return RollApplied(applied, None if use_cache else CacheOff(model), settings)
