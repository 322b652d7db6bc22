"""docs/api.md: every public name with the first line of its docstring, and a marker where the site shows the rest.

`python -m pages.api` writes it.
"""

from __future__ import annotations

import functools
from pathlib import Path

import griffe

__all__ = ["PAGE", "TOPICS", "page"]

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_HEAD = """# API

What `recollect` offers to import. Each name has a docstring with units, errors and an example that runs as a test:
`help(recollect.fit)` shows it, and so does this page on the site (`scripts/docs serve`). Anything else in the package may
change without notice.

<!-- written by: python -m pages.api -->
"""
TOPICS: dict[str, tuple[str, ...]] = {
    "In a loop": ("recollect.attach", "recollect.Attached", "recollect.capture", "recollect.CapturedStep"),
    "Step by step": (
        "recollect.fit",
        "recollect.record",
        "recollect.plan",
        "recollect.apply",
        "recollect.applied_to",
        "recollect.compile_options",
        "recollect.verify",
        "recollect.classic_plan",
        "recollect.largest_batch",
        "recollect.frontier",
    ),
    "What they return": (
        "recollect.Profile",
        "recollect.Plan",
        "recollect.UnitPlan",
        "recollect.Trip",
        "recollect.Applied",
        "recollect.Report",
        "recollect.LargestBatch",
        "recollect.Frontier",
    ),
    "Where memory goes": (
        "recollect.explain_peak",
        "recollect.PeakReport",
        "recollect.timeline",
        "recollect.Timeline",
        "recollect.write_trace",
        "recollect.write_snapshot",
        "recollect.layer_usage",
        "recollect.LayerUsage",
        "recollect.measure_peak",
        "recollect.PeakMeasurement",
    ),
    "More than one device": ("recollect.distribute_saved_activations",),
    "Pipelines": (
        "recollect.plan_pipeline",
        "recollect.predict_pipeline",
        "recollect.split_pipeline",
        "recollect.gathered_stage",
        "recollect.PipelineSplit",
        "recollect.PipelinePlan",
        "recollect.PipelineSchedule",
    ),
    "What went wrong": (
        "recollect.diagnose",
        "recollect.Finding",
        "recollect.coverage",
        "recollect.Coverage",
        "recollect.UnitCoverage",
    ),
    "Large vocabularies": ("recollect.chunked_cross_entropy",),
    "PyTorch's checkpointing, by its names": (
        "recollect.checkpoint",
        "recollect.checkpoint_sequential",
        "recollect.apply_activation_checkpointing",
        "recollect.policy_plan",
    ),
    "Trainers": (
        "recollect.integrations.transformers.MemoryBudget",
        "recollect.integrations.transformers.enable_memory_budget",
        "recollect.integrations.lightning.MemoryBudget",
        "recollect.integrations.lightning.BudgetHooks",
        "recollect.integrations.torchtitan.MemoryBudget",
        "recollect.integrations.deepspeed.initialize",
    ),
    "Settings of Megatron, ROLL, DeepSpeed and torchtitan": (
        "recollect.megatron_plan",
        "recollect.RecomputeConfig",
        "recollect.integrations.megatron.TrainingSetting",
        "recollect.integrations.megatron.NoRecompute",
        "recollect.integrations.megatron.UniformFull",
        "recollect.integrations.megatron.BlockFull",
        "recollect.integrations.megatron.Selective",
        "recollect.integrations.megatron.model_chunks",
        "recollect.integrations.megatron.megatron_stage_plans",
        "recollect.integrations.megatron.RULES",
        "recollect.integrations.megatron.nearest_settings",
        "recollect.integrations.megatron.megatron_flags",
        "recollect.integrations.megatron.bridge_lines",
        "recollect.integrations.megatron.RollCheckpointing",
        "recollect.integrations.megatron.roll_plan",
        "recollect.integrations.megatron.roll_recompute_config",
        "recollect.integrations.roll.apply_roll_checkpointing",
        "recollect.integrations.roll.RollApplied",
        "recollect.integrations.deepspeed.ActivationCheckpointing",
        "recollect.integrations.deepspeed.deepspeed_plan",
        "recollect.integrations.torchtitan_settings.TitanPolicy",
        "recollect.integrations.torchtitan_settings.torchtitan_plan",
        "recollect.integrations.torchtitan_settings.nearest_policy",
        "recollect.integrations.torchtitan_settings.torchtitan_flags",
    ),
}
_MADE_WHEN_ASKED_FOR = {  # by a module's __getattr__, where static readers see nothing
    "recollect.integrations.lightning.MemoryBudget": "`BudgetHooks` as a callback of the Lightning that is installed.",
    "recollect.integrations.megatron.RULES": "Every rule of Megatron's for settings that clash, by name.",
}


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for topic, names in TOPICS.items():
        rows = [f"| `{name}` | {_first_line(name)} |" for name in names]
        markers = [f"<!-- api: {name} -->" for name in names if name not in _MADE_WHEN_ASKED_FOR]
        parts.append("\n".join([f"## {topic}", "", "| name | |", "|---|---|", *rows, "", *_spaced(markers)]))
    errors = "All errors and warnings are in `recollect.errors`, which draws them as a tree."
    parts.append(f"## Errors and warnings\n\n{errors}\n\n<!-- api: recollect.errors -->\n")
    return "\n".join(parts)


def _spaced(markers: list[str]) -> list[str]:
    return [line for marker in markers for line in (marker, "")]


def _first_line(name: str) -> str:
    if name in _MADE_WHEN_ASKED_FOR:
        return _MADE_WHEN_ASKED_FOR[name]
    docstring = _package()[name.removeprefix("recollect.")].docstring
    return " ".join(docstring.value.partition("\n\n")[0].split()).replace("|", "\\|") if docstring else ""


@functools.lru_cache
def _package() -> griffe.Object | griffe.Alias:
    """Return the package as it is read without being imported: trainers need not be installed."""
    return griffe.load("recollect", search_paths=[str(PAGE.parents[1] / "src")])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print("written: docs/api.md")
