"""Has recordings take the times around ops that the tests' own process has measured, which writes them into a variable.

Ranks that measure them at once disturb one another, and measure again: a fifth of what a small case takes. A traced unit, which
takes two seconds to measure, counts as one on the tape. What processes are forked from imports this.
"""

import json
import os
from dataclasses import asdict

import torch

from recollect.profile.host_times import AroundOps, HostTimes
from recollect.recording import host_times

_VARIABLE = "RECOLLECT_TESTS_AROUND_OPS"
_CPU = torch.device("cpu")


def variable() -> dict[str, str]:
    return {_VARIABLE: json.dumps(asdict(host_times.around_ops(_CPU)))}


def _take(text: str) -> None:
    row = json.loads(text)
    known, measured = AroundOps(HostTimes(**row["host"]), row["recorded_s"]), host_times._measured
    measured_of_traces = host_times._traced_unit_s

    def known_or_measured(device: torch.device) -> AroundOps:
        return known if device == _CPU else measured(device)

    def known_or_measured_of_traces(device: torch.device) -> float:
        return known.host.unit_s if device == _CPU else measured_of_traces(device)

    host_times._measured = known_or_measured  # type: ignore[assignment]
    host_times._traced_unit_s = known_or_measured_of_traces  # type: ignore[assignment]


if _VARIABLE in os.environ:
    _take(os.environ[_VARIABLE])
