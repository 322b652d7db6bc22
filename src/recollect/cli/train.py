"""`recollect train`: train a language model within a memory budget, and report planned, predicted and measured numbers."""

import dataclasses
import signal

from rich import box
from rich.console import Console
from rich.table import Table

from recollect.byte_format import format_bytes
from recollect.cli.commands import Train
from recollect.integrations.megatron import RecomputeConfig
from recollect.lab.bench.report import shown, signed_percent
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.launched import is_first_launched, num_launched, shared_warnings
from recollect.lab.train.loop import train
from recollect.lab.train.records import Outcome
from recollect.printing import print_line
from recollect.quantities import format_seconds


def run_train(command: Train, console: Console) -> None:
    if not is_first_launched():
        console = Console(quiet=True)
    with shared_warnings():
        config = training_config(command)
    try:
        outcome = train(config, console=console)
    except Exception:
        if num_launched() > 1:
            # torchrun ends the remaining processes, which need time to print their errors.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    console.print(report_table(outcome))
    for line in report_lines(outcome):
        print_line(console, line)


def training_config(command: Train) -> TrainConfig:
    fields = command.recompute.fields()
    if not fields:
        return command.config
    if fields == {"distribute_saved_activations": True} and command.config.step.memory_budget is not None:
        # The plan chooses where that pays.
        return dataclasses.replace(command.config, step=dataclasses.replace(command.config.step, **fields))
    recompute = RecomputeConfig(**fields)
    recompute.check(command.config.training_setting(command.config.model.dimensions()))
    return dataclasses.replace(command.config, step=dataclasses.replace(command.config.step, recompute=recompute))


def report_table(outcome: Outcome) -> Table:
    table = Table(title="Planned, predicted, measured", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", "predicted", "measured"):
        table.add_column(heading, justify="left" if not heading else "right")
    baseline = outcome.baseline
    plain = (baseline.predicted_peak_bytes, baseline.measured_peak_bytes)
    table.add_row("peak without recompute", *(shown(format_bytes, nbytes) for nbytes in plain))
    if outcome.budget_bytes is not None:
        table.add_row("budget", format_bytes(outcome.budget_bytes), "", style="bold")
    own = (outcome.predicted_peak_bytes, outcome.measured_peak_bytes)
    table.add_row("peak of this run", *(shown(format_bytes, nbytes) for nbytes in own), style="bold")
    if baseline.measured_step_s is not None:
        table.add_row("fastest step without recompute", "", format_seconds(baseline.measured_step_s))
    if outcome.step_s is not None:
        table.add_row("fastest step of this run", "", format_seconds(outcome.step_s))
    added = (outcome.predicted_slowdown, _measured_slowdown(outcome))
    table.add_row("added time", *(shown(signed_percent, fraction) for fraction in added))
    return table


def report_lines(outcome: Outcome) -> list[str]:
    lines = []
    if outcome.records:
        first, last = outcome.records[0], outcome.records[-1]
        lines.append(
            f"Loss {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step} of {outcome.total_steps}."
        )
        validations = [record for record in outcome.records if record.validation_loss is not None]
        if validations:
            ends = validations[:1] if len(validations) == 1 else [validations[0], validations[-1]]
            losses = ", ".join(f"{record.validation_loss:.4f} after step {record.step}" for record in ends)
            lines.append(f"Validation loss {losses}.")
    else:
        lines.append(f"The run was complete: all {outcome.total_steps} steps had been done before.")
    budget_bytes, peak_bytes = outcome.budget_bytes, outcome.measured_peak_bytes
    if budget_bytes is not None and peak_bytes is not None:
        difference = format_bytes(abs(budget_bytes - peak_bytes))
        lines.append(
            f"The budget held, with {difference} to spare."
            if peak_bytes <= budget_bytes
            else f"The budget was EXCEEDED by {difference}: {outcome.excess_reason or 'please report this with plan.json'}."
        )
    lines.append(f"Metrics, plan and checkpoints are in {outcome.folder}.")
    return lines


def _measured_slowdown(outcome: Outcome) -> float | None:
    plain_s = outcome.baseline.measured_step_s
    return None if plain_s is None or outcome.step_s is None else outcome.step_s / plain_s - 1
