"""`recollect train`: train a language model within a memory budget."""

from __future__ import annotations

import dataclasses
import signal

from rich.console import Console

from recollect.cli.commands import Train
from recollect.integrations.megatron import RecomputeConfig
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.launched import is_first_launched, num_launched
from recollect.lab.train.loop import train
from recollect.lab.train.rank_warnings import shared_warnings
from recollect.lab.train.report import report_lines, report_table
from recollect.printing import print_line


def run_train(command: Train, console: Console) -> None:
    """Train, then print the report."""
    if not is_first_launched():
        console = Console(quiet=True)
    with shared_warnings():
        config = training_config(command)
    try:
        outcome = train(config, console=console)
    except Exception:
        if num_launched() > 1:
            # torchrun ends the processes that are left, which shall have the time to print their error.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    console.print(report_table(outcome))
    for line in report_lines(outcome):
        print_line(console, line)


def training_config(command: Train) -> TrainConfig:
    """Return the run's configuration with the recompute flags.

    Raises:
        ConfigError: flags clash with each other or with the model.
    """
    fields = command.recompute.fields()
    if not fields:
        return command.config
    if fields == {"distribute_saved_activations": True} and command.config.step.memory_budget is not None:
        # The plan says where that pays.
        return dataclasses.replace(command.config, step=dataclasses.replace(command.config.step, **fields))
    recompute = RecomputeConfig(**fields)
    recompute.check(command.config.training_setting(command.config.model.dimensions()))
    return dataclasses.replace(command.config, step=dataclasses.replace(command.config.step, recompute=recompute))
