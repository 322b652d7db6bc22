"""Plans of a pipeline's stages in a run: recorded and made once for all processes, kept in the run folder, and applied."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import recollect
from recollect.errors import NotYetError, PlanError, PlanFormatError
from recollect.fields import Field, read_document, read_file
from recollect.integrations.megatron import megatron_stage_plans
from recollect.lab.parallel.pipeline_step import received
from recollect.lab.parallel.stages import LossStage, PipelineRank
from recollect.lab.train.exchange import PipelineExchange
from recollect.lab.train.optimizer_step import build_optimizer
from recollect.lab.train.session import Session
from recollect.pipelines.pipeline import PipelinePlan
from recollect.planning.loss_chunks import fewest_chunks
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.quantities import parse_bytes
from recollect.ranks.group import Place

_FORMAT = "recollect.pipeline_plans"
_VERSION = 1


@dataclass(frozen=True)
class PipelinePlans:
    """The plans of a run's stages."""

    stages: tuple[tuple[Plan, ...], ...]
    """For each stage, a plan for all of its micro-batches, or one for each."""
    budget_bytes: int | None
    """The budget of each device; None with Megatron's settings."""
    predicted_peak_bytes: int
    """The peak of the rank that needs most."""
    predicted_slowdown: float
    plain_peak_bytes: int
    table: str
    """Peaks by rank and recompute by stage, as text."""

    def to_json(self) -> str:
        stages = [[json.loads(plan.to_json()) for plan in own] for own in self.stages]
        return json.dumps({"format": _FORMAT, "version": _VERSION, **vars(self), "stages": stages}) + "\n"

    @classmethod
    def load(cls, path: Path) -> PipelinePlans:
        data = read_file(
            path,
            expected="the plans of a pipeline that `recollect train` wrote",
            advice="Remove it and baseline.json next to it, and the run plans again.",
            error=PlanFormatError,
        )
        try:
            root = read_document(data.decode(), format=_FORMAT, version=_VERSION, error=PlanFormatError)
            stages = tuple(tuple(_read_plan(plan) for plan in own.array()) for own in root.get("stages").array())
            return root.record(cls, stages=stages)
        except (UnicodeDecodeError, PlanFormatError) as error:
            raise PlanFormatError(f"{path}: {error}") from None

    def to_text(self, _columns: int) -> str:
        return self.table

    @contextlib.contextmanager
    def applied(self, session: Session) -> Iterator[None]:
        """Within the block, the stages of this process run under their plans."""
        with contextlib.ExitStack() as stack:
            session.processes.ranks.together(lambda: self._apply(session, stack), Place.START)
            yield

    def _apply(self, session: Session, stack: contextlib.ExitStack) -> None:
        exchange = session.trained.exchange
        assert isinstance(exchange, PipelineExchange)
        schedule = exchange.step.schedule
        counts = [len(own) for own in self.stages]
        if len(counts) != schedule.num_stages or not {*counts} <= {1, schedule.num_micro_batches}:
            raise PlanError(
                f"the plans in {session.folder}: got those of {len(counts)} stages, of which each has {counts}, expected one, "
                f"or one for each of {schedule.num_micro_batches} micro-batches, for each of {schedule.num_stages} stages. "
                "Remove pipeline_plans.json and baseline.json there, and the run plans again."
            )
        for number, stage in exchange.rank.stages.items():
            own = self.stages[number]
            # Not compared: all processes have the first one's.
            applied = stack.enter_context(recollect.apply(stage, own[0] if len(own) == 1 else own, group="alone"))
            applied.follow(exchange.step.stages[number])


def _read_plan(place: Field) -> Plan:
    try:
        return Plan.from_json(json.dumps(place.data))
    except PlanFormatError as error:
        raise PlanFormatError(f"{place.where}: {error}") from None


def plan_stages(session: Session) -> PipelinePlans:
    """Record the stages and plan them, as the settings say; the same in all processes."""
    flags, processes = session.config.step, session.processes
    if parse_bytes(flags.host_budget):
        raise NotYetError(
            settings={"host_budget": flags.host_budget},
            needs="plans that offload, for the stages of a pipeline",
            advice="Train without host_budget, or without a pipeline.",
        )
    exchange, ranks = session.trained.exchange, processes.ranks
    assert isinstance(exchange, PipelineExchange)
    schedule = exchange.step.schedule
    same_stages = len(ranks.ranks) // processes.layout.pipeline_model_parallel_size
    found: dict[int, Profile] = {}
    plain_peaks_bytes: list[int] = []

    def plan(budget: int | str | None) -> PipelinePlan:
        profiles = [found[stage] for stage in range(len(found))]
        if not plain_peaks_bytes:
            plain = [recollect.classic_plan(profile, "keep_all") for profile in profiles]
            plain_peaks_bytes.append(recollect.predict_pipeline(profiles, schedule, plain).peak_bytes)
        if flags.recompute is None:
            assert budget is not None
            return recollect.plan_pipeline(profiles, schedule, budget)
        flags.recompute.check(session.config.training_setting(session.model.config))
        return recollect.predict_pipeline(profiles, schedule, megatron_stage_plans(profiles, schedule, flags.recompute))

    def planned(loss_chunks: int, budget: int | str | None) -> PipelinePlan:
        # All stages, or later only the last one, in their processes. Consecutive ranks with the same stages record
        # together; the first represents them all.
        own = ranks.together(
            lambda: record_own_stages(session, exchange.rank, loss_chunks=loss_chunks, only_last=bool(found)),
            Place.START,
        )
        for profiles in reversed(ranks.gather({} if processes.rank % same_stages else own, Place.START)):
            found.update(profiles)
        made = ranks.together(lambda: plan(budget) if processes.is_first else None, Place.PLANNED)
        return ranks.gather(made, Place.PLANNED)[0]

    if flags.loss_chunks == "auto":
        assert flags.memory_budget is not None  # else there is nothing to plan
        made = fewest_chunks(planned, flags.memory_budget)
    else:
        made = planned(flags.loss_chunks, flags.memory_budget)
    return PipelinePlans(
        stages=tuple((own,) if isinstance(own, Plan) else tuple(own) for own in made.plans),
        budget_bytes=made.budget_bytes,
        predicted_peak_bytes=made.peak_bytes,
        predicted_slowdown=made.slowdown,
        # With as many chunks as were planned first.
        plain_peak_bytes=ranks.gather(next(iter(plain_peaks_bytes), 0), Place.PLANNED)[0],
        table=repr(made),
    )


def record_own_stages(
    session: Session, rank: PipelineRank, *, loss_chunks: int = 1, only_last: bool = False
) -> dict[int, Profile]:
    """Record the stages of this process, each on one micro-batch, by number. Processes with the same stages do so together."""
    tokens, labels = next(session.batches(0))
    found = {}
    for number, stage in rank.stages.items():
        if only_last and not stage.is_last:
            continue
        x = tokens if stage.is_first else _received(session, stage, tokens.shape)
        # Over this process's part of the weights, which exists in addition to the whole ones.
        optimizer = build_optimizer(stage, session.config.optim)
        with recollect.gathered_stage(stage):
            found[number] = recollect.record(
                stage,
                stage.micro_batch(x, tokens, labels),
                optimizer=optimizer,
                loss_fn=None if stage.is_last else torch.sum,
                units=_units(stage),
                holds_output=False,
                gradients="accumulated",
                loss_chunks=loss_chunks if stage.is_last else 1,
                # Processes with the same stages run one plan.
                collectives="replay",
                group="alone",
            )
    return found


def _received(session: Session, stage: LossStage, shape: Sequence[int]) -> Tensor:
    """Return a stage's possible inputs: the same on the ranks that share its matrices, unless they split sequences.

    The recording compares values of these ranks, to find those that they may hold as parts.
    """
    processes = session.processes
    assert processes.mesh is not None
    part = processes.mesh.tensor.get_local_rank() if processes.layout.sequence_parallel else 0
    generator = torch.Generator(session.device).manual_seed(part)
    like, device = received(stage, shape), session.device
    return torch.randn(like.shape, dtype=like.dtype, device=device, generator=generator, requires_grad=True)


def _units(stage: LossStage) -> list[str]:
    """Return the paths of the layers; where there is a single one, none is found."""
    found = [f"decoder.layers.{layer}" for layer in range(len(stage.decoder.layers))]
    if stage.mtp is not None:
        found += [f"mtp.layers.{depth}" for depth in range(len(stage.mtp.layers))]
    return found
