"""Time layers that run again as a whole in backward, on copies of them.

The tape runs dropped values again op by op, with Python around each. Where kernels are short, on a fast device or in a small
layer, that Python is most of the time, and a second run of the whole layer takes less.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch

from recollect.applying import apply
from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.progress import stage
from recollect.recording.unit_samples import UnitSample
from recollect.recording.unit_times import rounds_within, time_run

_AGAIN = Plan({"": UnitPlan({}, engine=EngineChoice.REGION)})


def with_reruns(profile: Profile, samples: Mapping[int, UnitSample], device: torch.device) -> Profile:
    """Return a profile whose repeated units know what running them again as a whole takes, where a copy can run alone."""
    repeated = sorted({call.graph for call in profile.calls if call.repeated} & samples.keys())
    found: dict[int, float] = {}
    graphs = list(profile.graphs)
    with stage("timing layers that run again", total=len({id(samples[index]) for index in repeated})) as done:
        for index in repeated:
            kind = id(samples[index])
            if kind not in found:
                found[kind] = _rerun_s(samples[index], device)
                done()
            graphs[index] = replace(graphs[index], rerun_s=found[kind])
    return replace(profile, graphs=tuple(graphs))


def _rerun_s(sample: UnitSample, device: torch.device) -> float:
    """Return the seconds that a second run adds to a unit's forward and backward; 0 if it cannot run alone."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What is said of a copy says nothing of the model.
        try:
            sample = sample.whole()
            module = sample.copied_module()

            def added_s() -> tuple[float, float]:
                plain_s = math.fsum(time_run(sample, module, device) or ())
                with apply(module, _AGAIN):
                    return plain_s, math.fsum(time_run(sample, module, device) or ()) - plain_s

            first_s = added_s()  # A warm-up.
            return max(0.0, statistics.median(added_s()[1] for _ in range(rounds_within(2 * first_s[0] + first_s[1]))))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - the user's module, out of its model, may raise anything.
            return 0.0
