"""What is wrong in a job of torchtitan: settings of `activation_checkpoint` beside `compile`, as its TOML files have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recollect.doctor.finding import Finding, Rule
from recollect.doctor.rules_checkpoint import CHECKPOINT_RULES
from recollect.doctor.settings import Settings

__all__ = ["TORCHTITAN_RULES", "findings"]

_BUDGET_BOUNDS_NO_PEAK = next(rule for rule in CHECKPOINT_RULES if rule.name == "compile-budget")
_OURS = "Or bound the peak itself: MemoryBudget of recollect.integrations.torchtitan (docs/trainers.md)."

BUDGET_NEEDS_COMPILE = Rule(
    name="torchtitan-budget-needs-compile",
    sees="torchtitan's activation_checkpoint.mode memory_budget, and no compiled model",
    problem="torchtitan's memory_budget needs a compiled model.",
    cause="It is a setting of PyTorch's compiler, which decides what a compiled graph saves; torchtitan refuses it otherwise.",
    fix=("[compile] enable = true, with model among its components.", _OURS),
    source="torchtitan/distributed/activation_checkpoint.py",
)
SELECTIVE_AND_COMPILE = Rule(
    name="torchtitan-selective-and-compile",
    sees="torchtitan's activation_checkpoint.mode selective, and a compiled model",
    problem="Selective checkpointing under torch.compile can be slow, or save little.",
    cause="The compiler plans what it saves by itself, around what the policy asks for.",
    fix=("Compare the peak and the time of a step with mode full, and with compile off.", _OURS),
    source="pytorch/pytorch#161889; pytorch/torchtitan#1631, #1683",
    certainty="possible",
)
TORCHTITAN_RULES = (BUDGET_NEEDS_COMPILE, SELECTIVE_AND_COMPILE)


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield what the settings of one job show.

    Args:
        settings: the job's, with its sections as mappings.

    Yields:
        Clashes first.
    """
    mode = _section(settings, "activation_checkpoint").get("mode")
    compiles = _compiles_model(settings)
    shown = f"{settings.place}: activation_checkpoint.mode: {mode}, compile of the model: {'on' if compiles else 'off'}"
    if mode == "memory_budget" and not compiles:
        yield BUDGET_NEEDS_COMPILE.finding(shown)
    elif mode == "memory_budget":
        budget = _section(settings, "activation_checkpoint").get("memory_budget", 0.5)
        yield _BUDGET_BOUNDS_NO_PEAK.finding(f"{shown}, memory_budget: {budget}", budget=budget)
    elif mode == "selective" and compiles:
        yield SELECTIVE_AND_COMPILE.finding(shown)


def _compiles_model(settings: Settings) -> bool:
    section = _section(settings, "compile")
    if section.get("enable") is True:
        return "model" in section.get("components", ("model",))
    return _section(settings, "training").get("compile") is True  # where earlier versions have it


def _section(settings: Settings, name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}
