"""Fits PyTorch training into the memory you have, at the least slowdown possible, and proves it.

The names below are the public API. They are imported on first use, so that `import recollect` is quick and the planner
works where PyTorch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect.applying import applied_to, apply
    from recollect.attaching.attach import attach
    from recollect.attaching.attached import Attached
    from recollect.checkpointing.checkpoint import checkpoint, checkpoint_sequential
    from recollect.checkpointing.modules import apply_activation_checkpointing
    from recollect.checkpointing.policy_plan import policy_plan
    from recollect.doctor.diagnose import diagnose
    from recollect.doctor.finding import Finding
    from recollect.engine.placed_forward import Applied
    from recollect.engine.sharded_keep import distribute_saved_activations
    from recollect.fitting import fit
    from recollect.integrations.megatron.compile import megatron_plan
    from recollect.integrations.megatron.config import RecomputeConfig
    from recollect.loss.chunked import chunked_cross_entropy
    from recollect.measuring.meter import PeakMeasurement, measure_peak
    from recollect.pipelines.pipeline import PipelinePlan
    from recollect.pipelines.plan_pipeline import plan_pipeline, predict_pipeline
    from recollect.pipelines.schedule import PipelineSchedule
    from recollect.pipelines.split_pipeline import PipelineSplit, split_pipeline
    from recollect.planning.batch_search import LargestBatch
    from recollect.planning.classic import classic_plan
    from recollect.planning.frontier import Frontier, frontier
    from recollect.planning.planners import plan
    from recollect.plans.plan import Plan
    from recollect.plans.unit_plan import UnitPlan
    from recollect.profile.profile import Profile
    from recollect.recording.gathered_stage import gathered_stage
    from recollect.recording.record import record
    from recollect.simulation.layer_usage import LayerUsage, layer_usage
    from recollect.simulation.timeline import PeakReport, Timeline, explain_peak, timeline
    from recollect.sizing import largest_batch
    from recollect.verification.report import Report
    from recollect.verification.verify import verify

__all__ = [
    "Applied",
    "Attached",
    "Finding",
    "Frontier",
    "LargestBatch",
    "LayerUsage",
    "PeakMeasurement",
    "PeakReport",
    "PipelinePlan",
    "PipelineSchedule",
    "PipelineSplit",
    "Plan",
    "Profile",
    "RecomputeConfig",
    "Report",
    "Timeline",
    "UnitPlan",
    "applied_to",
    "apply",
    "apply_activation_checkpointing",
    "attach",
    "checkpoint",
    "checkpoint_sequential",
    "chunked_cross_entropy",
    "classic_plan",
    "diagnose",
    "distribute_saved_activations",
    "explain_peak",
    "fit",
    "frontier",
    "gathered_stage",
    "largest_batch",
    "layer_usage",
    "measure_peak",
    "megatron_plan",
    "plan",
    "plan_pipeline",
    "policy_plan",
    "predict_pipeline",
    "record",
    "split_pipeline",
    "timeline",
    "verify",
]

__version__ = "0.1.0"

_HOME_OF_NAME = {
    "Applied": "recollect.engine.placed_forward",
    "Attached": "recollect.attaching.attached",
    "Finding": "recollect.doctor.finding",
    "Frontier": "recollect.planning.frontier",
    "LargestBatch": "recollect.planning.batch_search",
    "LayerUsage": "recollect.simulation.layer_usage",
    "PeakMeasurement": "recollect.measuring.meter",
    "PeakReport": "recollect.simulation.timeline",
    "PipelinePlan": "recollect.pipelines.pipeline",
    "PipelineSchedule": "recollect.pipelines.schedule",
    "PipelineSplit": "recollect.pipelines.split_pipeline",
    "Plan": "recollect.plans.plan",
    "Profile": "recollect.profile.profile",
    "RecomputeConfig": "recollect.integrations.megatron.config",
    "Report": "recollect.verification.report",
    "Timeline": "recollect.simulation.timeline",
    "UnitPlan": "recollect.plans.unit_plan",
    "applied_to": "recollect.applying",
    "apply": "recollect.applying",
    "apply_activation_checkpointing": "recollect.checkpointing.modules",
    "attach": "recollect.attaching.attach",
    "checkpoint": "recollect.checkpointing.checkpoint",
    "checkpoint_sequential": "recollect.checkpointing.checkpoint",
    "chunked_cross_entropy": "recollect.loss.chunked",
    "classic_plan": "recollect.planning.classic",
    "diagnose": "recollect.doctor.diagnose",
    "distribute_saved_activations": "recollect.engine.sharded_keep",
    "explain_peak": "recollect.simulation.timeline",
    "fit": "recollect.fitting",
    "frontier": "recollect.planning.frontier",
    "gathered_stage": "recollect.recording.gathered_stage",
    "largest_batch": "recollect.sizing",
    "layer_usage": "recollect.simulation.layer_usage",
    "measure_peak": "recollect.measuring.meter",
    "megatron_plan": "recollect.integrations.megatron.compile",
    "plan": "recollect.planning.planners",
    "plan_pipeline": "recollect.pipelines.plan_pipeline",
    "policy_plan": "recollect.checkpointing.policy_plan",
    "predict_pipeline": "recollect.pipelines.plan_pipeline",
    "record": "recollect.recording.record",
    "split_pipeline": "recollect.pipelines.split_pipeline",
    "timeline": "recollect.simulation.timeline",
    "verify": "recollect.verification.verify",
}


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
