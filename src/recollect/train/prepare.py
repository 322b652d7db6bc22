"""Before the first step: the plan for the whole run, and the step without recompute to compare with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import recollect
from recollect.loss.choose import plan_with_chunks
from recollect.profile.graph import Profile
from recollect.quantities import format_bytes
from recollect.train.files import write_text
from recollect.train.memory import measure_plain
from recollect.train.optim import build_optimizer
from recollect.train.records import Baseline
from recollect.train.session import Session
from recollect.train.step import build_model, train_step

if TYPE_CHECKING:
    from recollect.plan import Plan


def prepare(session: Session, console: Console) -> tuple[Plan | None, Baseline]:
    """Make the run's plan and baseline, or read them from its folder.

    They are written there as plan.json and baseline.json, so that a resumed run computes as before.

    Args:
        session: the run; its model and optimizer are left as they are.
        console: where the plan is printed.

    Returns:
        The plan, None without a budget, and the baseline.

    Raises:
        QuantityError: the budget is no amount of memory.
        BudgetTooSmallError: no plan fits the budget.
        PlanFormatError: plan.json is damaged.
    """
    chunks = session.config.step.loss_chunks
    if session.config.step.memory_budget is None and chunks != "auto":
        session.model.loss_chunks = chunks  # else the plan sets it
    plan_path, baseline_path = session.folder / "plan.json", session.folder / "baseline.json"
    budget = session.config.step.memory_budget
    if baseline_path.exists() and (budget is None or plan_path.exists()):
        plan = None if budget is None else recollect.Plan.load(plan_path)
        return plan, Baseline(**json.loads(baseline_path.read_text()))
    baseline = Baseline()
    plan = None
    if session.config.run.measure_plain:
        console.print("Measuring seven steps without recompute", markup=False)
        peak_bytes, step_s = _measure_plain(session)
        baseline = dataclasses.replace(baseline, measured_peak_bytes=peak_bytes, measured_step_s=step_s)
    if budget is not None:
        console.print(f"Recording a step and planning for {budget}", markup=False)
        plan, predicted_bytes = _decide(session, budget, plan_path)
        baseline = dataclasses.replace(baseline, predicted_peak_bytes=predicted_bytes)
        console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
        text = f"Without recompute the step would need {format_bytes(predicted_bytes)}, the budget is "
        console.print(text + f"{format_bytes(plan.budget_bytes or 0)}.", markup=False, soft_wrap=True)
    write_text(baseline_path, json.dumps(dataclasses.asdict(baseline)) + "\n")
    return plan, baseline


def _decide(session: Session, budget: str, path: Path) -> tuple[Plan, int]:
    """Return the plan, and the predicted peak in bytes of the step without recompute."""

    def record(loss_chunks: int) -> Profile:
        profile: Profile = recollect.record(
            session.model,
            next(session.batches(0)),
            optimizer=session.optimizer,
            # From the second micro-batch on, gradients are there through forward too: that is the one that must fit.
            accumulates_gradients=session.config.optim.accumulation > 1,
            loss_chunks=loss_chunks,
        )
        return profile

    planned = plan_with_chunks(record, budget, session.config.step.loss_chunks)
    write_text(path, planned.plan.to_json())
    return planned.plan, planned.plain_peak_bytes


def _measure_plain(session: Session) -> tuple[int, float]:
    """Measure on a twin of the model, so that the run itself does not move."""
    flags = session.config
    model = build_model(session.model.config, flags.step)
    optimizer = build_optimizer(model, flags.optim)
    batches = list(session.batches(0))

    def step() -> object:
        return train_step(
            model, optimizer, batches, accumulation=flags.optim.accumulation, clip_norm=flags.optim.clip_norm
        )

    return measure_plain(step, device=session.device, model=model, optimizer=optimizer)
