"""Says what units cannot do while a CUDA graph is captured.

NOTE [ Captured steps ]
A graph repeats kernels, but none of the host's decisions between them. So while one is captured, the engines never read a
tensor's content, a generator's state or a clock; `is_capturing` is asked once for each call of a unit. Checks that need to are
made in the warm-up steps before: a unit without one is refused, as is anything that would need more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from recollect._torch_private import is_capturing
from recollect.errors import ConfigError
from recollect.plans.paths import unit_words

_is_told = ContextVar("is_told", default=False)


@contextmanager
def told_of_capture(is_told: bool = True) -> Iterator[None]:
    """Within the block, tell code that asks PyTorch on this thread that a CUDA graph is captured; or not, unless one is.

    The masks of transformers ask: if none is, they read tensors, and make no mask where a captured step makes one.
    """
    asked, before = torch.cuda.is_current_stream_capturing, _is_told.set(is_told)
    torch.cuda.is_current_stream_capturing = lambda: _is_told.get() or is_capturing()
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
        _is_told.reset(before)


def refused(what: str, value: str, reason: str, advice: str) -> ConfigError:
    settings = {what: value, "torch.cuda.graph": "capturing"}
    return ConfigError(settings=settings, reason=reason, advice=f"{advice}, or run the step outside torch.cuda.graph.")


def not_warmed_up(
    what: str, reason: str = "that compares what tensors hold, which cannot be read during a capture"
) -> ConfigError:
    return refused(what, "the first call", reason, "Run three such steps with this plan before the capture")


def draws_again(unit_path: str, what: str) -> ConfigError:
    return refused(
        f"{what} in {unit_words(unit_path)}",
        "recompute",
        "to draw the same random numbers again takes a generator's state, which cannot be read during a capture",
        "Keep it: give it the action 'keep' in the plan, or 'save' in a checkpoint's policy",
    )
