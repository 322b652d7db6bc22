"""The region engine: re-run a whole module in backward, for modules that the tape cannot see into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def run_region(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module now, keep only its inputs, and run it again when backward needs what it saved.

    Non-reentrant, so that it works where no input requires grad and where only some outputs are used. The module's
    Python runs twice: side effects (counters, caches) happen twice, which is why the tape is the engine of first choice.
    """
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
