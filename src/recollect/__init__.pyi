"""The public names and their homes: for type checkers, and for `__init__.py`, which reads them here."""

from recollect.applying import applied_to as applied_to
from recollect.applying import apply as apply
from recollect.attaching.attach import attach as attach
from recollect.attaching.attached import Attached as Attached
from recollect.checkpointing.checkpoint import apply_activation_checkpointing as apply_activation_checkpointing
from recollect.checkpointing.checkpoint import checkpoint as checkpoint
from recollect.checkpointing.checkpoint import checkpoint_sequential as checkpoint_sequential
from recollect.checkpointing.op_policy import policy_plan as policy_plan
from recollect.doctor.diagnose import diagnose as diagnose
from recollect.doctor.rule import Finding as Finding
from recollect.engine.placed_forward import Applied as Applied
from recollect.engine.together import distribute_saved_activations as distribute_saved_activations
from recollect.fitting import fit as fit
from recollect.integrations.megatron.compile import megatron_plan as megatron_plan
from recollect.integrations.megatron.rules import RecomputeConfig as RecomputeConfig
from recollect.loss.chunked import chunked_cross_entropy as chunked_cross_entropy
from recollect.measuring.meter import PeakMeasurement as PeakMeasurement
from recollect.measuring.meter import measure_peak as measure_peak
from recollect.pipelines.pipeline import PipelinePlan as PipelinePlan
from recollect.pipelines.plan_pipeline import plan_pipeline as plan_pipeline
from recollect.pipelines.plan_pipeline import predict_pipeline as predict_pipeline
from recollect.pipelines.schedule import PipelineSchedule as PipelineSchedule
from recollect.pipelines.split_pipeline import PipelineSplit as PipelineSplit
from recollect.pipelines.split_pipeline import split_pipeline as split_pipeline
from recollect.planning.batch_search import LargestBatch as LargestBatch
from recollect.planning.classic import classic_plan as classic_plan
from recollect.planning.explain import LayerUsage as LayerUsage
from recollect.planning.explain import layer_usage as layer_usage
from recollect.planning.frontier import Frontier as Frontier
from recollect.planning.frontier import frontier as frontier
from recollect.planning.planners import plan as plan
from recollect.plans.plan import Plan as Plan
from recollect.plans.trip import Trip as Trip
from recollect.plans.unit_plan import UnitPlan as UnitPlan
from recollect.profile.profile import Profile as Profile
from recollect.recording.record import record as record
from recollect.recording.restored_state import gathered_stage as gathered_stage
from recollect.simulation.timeline import PeakReport as PeakReport
from recollect.simulation.timeline import Timeline as Timeline
from recollect.simulation.timeline import explain_peak as explain_peak
from recollect.simulation.timeline import timeline as timeline
from recollect.sizing import largest_batch as largest_batch
from recollect.verification.report import Report as Report
from recollect.verification.verify import verify as verify

__version__: str
