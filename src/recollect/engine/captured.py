"""Says what units cannot do while a CUDA graph is captured.

NOTE [ Captured steps ]
A graph repeats kernels, but none of the host's decisions between them. So while one is captured, the engines never read a
tensor's content, a generator's state or a clock; `is_capturing` is asked once for each call of a unit. Checks that need to are
made in the warm-up steps before: a unit without one is refused, as is anything that would need more.
"""

from recollect.errors import ConfigError
from recollect.plans.paths import unit_words


def refused(what: str, value: str, reason: str, advice: str) -> ConfigError:
    """Return the error for a setting that cannot be captured; `advice` is an alternative to no capture."""
    settings = {what: value, "torch.cuda.graph": "capturing"}
    return ConfigError(settings=settings, reason=reason, advice=f"{advice}, or run the step outside torch.cuda.graph.")


def not_warmed_up(
    what: str, reason: str = "that compares what tensors hold, which cannot be read during a capture"
) -> ConfigError:
    """Return the error for a capture of something that has not run under its plan before."""
    return refused(what, "the first call", reason, "Run three such steps with this plan before the capture")


def draws_again(unit_path: str, what: str) -> ConfigError:
    """Return the error for values that a unit would recompute with the random numbers of forward."""
    return refused(
        f"{what} in {unit_words(unit_path)}",
        "recompute",
        "to draw the same random numbers again takes a generator's state, which cannot be read during a capture",
        "Keep it: give it the action 'keep' in the plan, or 'save' in a checkpoint's policy",
    )
