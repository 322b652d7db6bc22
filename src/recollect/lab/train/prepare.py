"""Prepare a run before its first step: make its plan, and the baseline without recompute.

The plans of a pipeline's stages are recorded and made once for all processes, kept in the run folder, and applied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import recollect
from recollect.byte_format import format_bytes
from recollect.capturing.plan_for_pool import plan_for_pool
from recollect.errors import NotYetError, PlanError, PlanFormatError
from recollect.fields import Field, read_document, read_file
from recollect.integrations.megatron import megatron_plan, megatron_stage_plans
from recollect.lab.parallel.pipeline_step import received
from recollect.lab.parallel.stages import LossStage, PipelineRank
from recollect.lab.train.config import StepFlags
from recollect.lab.train.exchange import PipelineExchange
from recollect.lab.train.files import read_object, write_text
from recollect.lab.train.optimizer_step import build_optimizer, measure_step
from recollect.lab.train.records import Baseline
from recollect.lab.train.session import Session
from recollect.lab.train.trained import build_trained
from recollect.measuring.timing import timed
from recollect.pipelines.pipeline import PipelinePlan
from recollect.planning.loss_chunks import fewest_chunks, plan_with_chunks
from recollect.plans.plan import Plan
from recollect.printing import columns_of, print_line
from recollect.profile.profile import Profile
from recollect.quantities import parse_bytes
from recollect.ranks.group import Place
from recollect.ranks.members import common_plan
from recollect.recording.restored_state import restored_buffers
from recollect.recording.step_recording import Collectives

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
        batch = {"x": tokens}
        if not stage.is_first:
            batch["x"] = _received(session, stage, tokens.shape)
        if stage.is_last:
            batch["labels"] = labels
            if stage.mtp is not None:
                batch["tokens"] = tokens
        # Over this process's part of the weights, which exists in addition to the whole ones.
        optimizer = build_optimizer(stage, session.config.optim)
        with recollect.gathered_stage(stage):
            found[number] = recollect.record(
                stage,
                batch,
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


def prepare(session: Session, console: Console) -> tuple[Plan | PipelinePlans | None, Baseline]:
    """Make the run's plan and baseline, or read them from its folder.

    Both are saved as plan.json (of a pipeline pipeline_plans.json) and baseline.json: a resumed run computes the same. Without
    a budget or Megatron's settings there is no plan.

    Raises:
        PlanFormatError: plan.json or pipeline_plans.json is damaged.
        CheckpointError: baseline.json is.
    """
    flags = session.config.step
    is_planned = flags.memory_budget is not None or flags.recompute is not None
    if not is_planned and flags.loss_chunks != "auto":
        session.model.loss_chunks = flags.loss_chunks  # otherwise the plan sets it
    is_pipeline = session.processes.layout.pipeline_model_parallel_size > 1
    kind = PipelinePlans if is_pipeline else recollect.Plan
    plan_path = session.folder / ("pipeline_plans.json" if is_pipeline else "plan.json")
    baseline_path = session.folder / "baseline.json"
    ranks = session.processes.ranks
    has_both = baseline_path.exists() and (not is_planned or plan_path.exists())
    if ranks.all_of([has_both], Place.START)[0]:
        return ranks.together(
            lambda: (kind.load(plan_path) if is_planned else None, _read_baseline(baseline_path)), Place.START
        )
    baseline = Baseline()
    plan: Plan | PipelinePlans | None = None
    if session.config.run.measure_plain:
        print_line(console, "Measuring seven steps without recompute")
        peak_bytes, step_s = _measure_plain(session)
        baseline = dataclasses.replace(baseline, measured_peak_bytes=peak_bytes, measured_step_s=step_s)
    if is_planned:
        print_line(console, f"Recording a step and planning for {_aim(flags)}")
        if is_pipeline:
            plan = plan_stages(session)
            predicted_bytes = plan.plain_peak_bytes
        else:
            plan, predicted_bytes = _decide(session)
        if session.processes.is_first:
            write_text(plan_path, plan.to_json())
        baseline = dataclasses.replace(baseline, predicted_peak_bytes=predicted_bytes)
        print_line(console, plan.to_text(columns_of(console)))
        text = f"Without recompute the step would need {format_bytes(predicted_bytes)}"
        if plan.budget_bytes is not None:
            text += f", the budget is {format_bytes(plan.budget_bytes)}"
        print_line(console, f"{text}.")
    if session.processes.is_first:
        write_text(baseline_path, json.dumps(dataclasses.asdict(baseline)) + "\n")
    return plan, baseline


def _read_baseline(path: Path) -> Baseline:
    names = [field.name for field in dataclasses.fields(Baseline)]
    found = read_object(path, keys=names, advice="Remove it, and the run measures and plans again.")
    return Baseline(**{name: found[name] for name in names})


def _aim(flags: StepFlags) -> str:
    """Describe the goal of the plan in a few words."""
    if flags.recompute is None:
        return str(flags.memory_budget)
    return ", ".join(f"{name}={value}" for name, value in flags.recompute.changed().items()) or "Megatron's defaults"


def _decide(session: Session) -> tuple[Plan, int]:
    """Return the plan, and the predicted peak in bytes of the step without recompute."""
    flags, processes = session.config.step, session.processes
    ranks = processes.ranks

    if flags.recompute is None and flags.captures:
        profile = _recorded(session, 1)
        plain_bytes = recollect.classic_plan(profile, "keep_all").predicted_peak_bytes or 0
        return plan_for_pool(profile, str(flags.memory_budget)).plan, plain_bytes
    if flags.recompute is None:
        planned = ranks.together(
            lambda: plan_with_chunks(
                lambda chunks: _recorded(session, chunks),
                str(flags.memory_budget),
                flags.loss_chunks,
                flags.host_budget,
            ),
            Place.PLANNED,
        )
        plain_bytes, budget_bytes = planned.plain_peak_bytes, planned.plan.budget_bytes or 0
        plan, _ = common_plan(
            planned.profile, planned.plan, plain_bytes=plain_bytes, budget_bytes=budget_bytes, ranks=ranks
        )
        return plan, plain_bytes
    profile = _recorded(session, 1 if flags.loss_chunks == "auto" else flags.loss_chunks)
    plan = megatron_plan(profile, flags.recompute, session.config.training_setting(session.model.config))
    return plan, recollect.classic_plan(profile, "keep_all").predicted_peak_bytes or 0


def _recorded(session: Session, loss_chunks: int) -> Profile:
    trained, group = session.trained, session.processes.plan_group
    # The first makes gradients, those after it add to them, and in the last they are reduced.
    batches = list(itertools.islice(session.batches(0), 3))

    def step() -> None:
        for number, (tokens, labels) in enumerate(batches, 1):
            with trained.exchange.micro_batch(is_last=number == len(batches)):
                trained.wrapped(tokens, labels).loss.backward()
        trained.optimizer.zero_grad(set_to_none=True)

    how: dict[str, Any] = {"batch": batches[0]}
    # This loop holds only the loss. From the second micro-batch on, gradients exist during forward, too.
    how |= {"holds_output": False, "gradients": "accumulated" if len(batches) > 1 else "freed"}
    if trained.wrapped is not trained.model:
        # Only in an unmodified step do gradients become parts of DDP's buckets, which always exist.
        how = {"step": step}
    # All processes run one plan, so collectives may run again.
    collectives: Collectives = "keep" if group is None else "replay"
    # The routers count the tokens of the run, not of a step that is recorded.
    with restored_buffers(trained.model):
        return recollect.record(
            trained.wrapped,
            optimizer=trained.optimizer,
            loss_chunks=loss_chunks,
            collectives=collectives,
            host_link=bool(parse_bytes(session.config.step.host_budget)),
            group=group,
            **how,
        )


def _measure_plain(session: Session) -> tuple[int, float]:
    """Return the peak in bytes of a step without recompute, and the seconds of the fastest of five.

    A copy of the model is measured, which leaves the run itself unchanged.
    """
    flags = session.config
    copy = build_trained(session.model.config, flags, session.processes)
    batches = list(session.batches(0))

    def step() -> object:
        return copy.step(batches, clip_norm=flags.optim.clip_norm)

    step()  # creates the optimizer state and warms up
    times = [timed(step, session.device)[1] for _ in range(5)]
    _, peak_bytes = measure_step(step, device=session.device, model=copy.wrapped, optimizer=copy.optimizer)
    return peak_bytes, min(times)
