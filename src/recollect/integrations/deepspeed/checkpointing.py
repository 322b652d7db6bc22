"""Stands in for `deepspeed.checkpointing`, in code that calls it on its layers: the same names, on recollect's tape.

    from recollect.integrations.deepspeed import checkpointing  # was: from deepspeed import checkpointing

    checkpointing.configure(None, deepspeed_config="ds_config.json")
    hidden = checkpointing.checkpoint(layer, hidden)

docs/trainers.md has the effect of the settings of `configure`. `checkpoint` and `non_reentrant_checkpoint` are
`recollect.checkpoint`: the function runs once, and its ops are recomputed. DeepSpeed itself need not be installed.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from recollect.checkpointing.checkpoint import checkpoint as checkpoint_on_tape
from recollect.errors import ConfigError
from recollect.integrations.deepspeed.section import ActivationCheckpointing, read_config

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]


class _State:
    """Whether `configure` was called, as DeepSpeed's module remembers it."""

    is_configured = False


def configure(
    mpu_: Any = None,
    deepspeed_config: str | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Check settings of `deepspeed.checkpointing.configure`, a configuration or its path, and others.

    Raises:
        ConfigError: an invalid value or a clash; `deepspeed.checkpointing` is configured, too.
        NotYetError: values split among ranks, or in host memory.

    Warns:
        ConfigWarning: a setting that has no effect.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = dict(read_config({"config": deepspeed_config}).get("activation_checkpointing", {}))
    section.update((name, value) for name, value in given.items() if value is not None)
    checked = ActivationCheckpointing.of({"activation_checkpointing": section})
    if checked is not None:
        checked.refuse_not_yet("Leave it out; what a call gets is then kept.")
    theirs = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    if theirs is not None and theirs.is_configured():
        raise ConfigError(
            settings={"deepspeed.checkpointing.is_configured()": True},
            reason="layers called by one of the two and layers called by the other would recompute each other's values",
            advice="Call configure and checkpoint of one of them only.",
        )
    _State.is_configured = True


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _State.is_configured


def reset() -> None:
    """Do nothing: there are no buffers to reset, since a call's values are freed with its graph."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function, drop the values that it computes, and recompute them in backward; see `recollect.checkpoint`.

    All arguments are the function's own. Return its result; of a tuple or list with one item that item, of a longer one a
    tuple, as from DeepSpeed.
    """
    # DeepSpeed passes all keywords to the function, even those that PyTorch's checkpoint would take for its own.
    result = checkpoint_on_tape(partial(function, **kwargs) if kwargs else function, *args, use_reentrant=False)
    if not isinstance(result, (tuple, list)):
        return result
    return result[0] if len(result) == 1 else tuple(result)


non_reentrant_checkpoint = checkpoint
"""The same: `checkpoint` never runs backward inside backward."""
