"""Prepare a run before its first step: make its plan, and the baseline without recompute."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import recollect
from recollect.byte_format import format_bytes
from recollect.capturing.plan_for_pool import plan_for_pool
from recollect.integrations.megatron import megatron_plan
from recollect.lab.train.config import StepFlags
from recollect.lab.train.files import read_object, write_text
from recollect.lab.train.optimizer_step import measure_step
from recollect.lab.train.pipeline_plans import PipelinePlans, plan_stages
from recollect.lab.train.records import Baseline
from recollect.lab.train.session import Session
from recollect.lab.train.trained import build_trained
from recollect.measuring.timing import timed
from recollect.planning.loss_chunks import plan_with_chunks
from recollect.printing import columns_of, print_line
from recollect.profile.profile import Profile
from recollect.quantities import parse_bytes
from recollect.ranks.group import Place
from recollect.ranks.members import common_plan
from recollect.recording.restored_state import restored_buffers
from recollect.recording.step_recording import Collectives

if TYPE_CHECKING:
    from recollect.plans.plan import Plan


def prepare(session: Session, console: Console) -> tuple[Plan | PipelinePlans | None, Baseline]:
    """Make the run's plan and baseline, or read them from its folder.

    Both are saved as plan.json (of a pipeline pipeline_plans.json) and baseline.json: a resumed run computes the same. Without
    a budget or Megatron's settings there is no plan.
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
