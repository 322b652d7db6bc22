"""Shows a step's memory over time under a plan, and what is alive at any moment, above all at the peak.

Every byte belongs to one category, and the categories add up exactly to the predicted bytes, because they come from the
playback that predicts the peak (`simulation/simulate.py`).

`CATEGORIES` describes each of them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recollect.arguments import check_kind
from recollect.byte_format import format_bytes
from recollect.notebooks import ShownInNotebooks
from recollect.plans.plan import Plan
from recollect.plans.text import label_paths
from recollect.profile.events import BACKWARD, FORWARD, OPTIMIZER
from recollect.profile.profile import Profile, kind_text
from recollect.simulation.decisions import decide
from recollect.simulation.lifetimes import LOSS, Lifetime, Lifetimes, lifetimes
from recollect.simulation.playback import OUTSIDE
from recollect.simulation.storage_names import StorageNames

CATEGORIES = {
    "parameters": "the weights; there before the step",
    "optimizer state": "such as the moments of AdamW; there before the step",
    "buffers and batch": "what the model holds besides weights, and the input; there before the step",
    # There before the step, on CUDA.
    "other allocations": "what else the allocator counts, such as library workspaces and other models",
    # Those of the last step among them.
    "gradients": "of the parameters: what backward leaves behind, or found there (accumulation)",
    # And states of random generators. Backward still finds them.
    "kept values": "made in forward by the units (mostly layers), for backward",
    # The loss and what it saves.
    "outside of the units": "made in forward between the units, such as by the loss",
    "returned values": "offloaded in forward, back from host memory",
    "recomputed values": "dropped in forward, made again for backward",
    # And results that nothing saves.
    "passing values": "die in the phase that made them, such as gradients on their way",
    # Its results included.
    "working memory": "an op's workspace while it runs",
    # `Profile.calibration_bytes`.
    "calibration": "measured peak of the recorded step minus its simulated one",
}
"""Descriptions of the categories, from the longest-lived to the shortest."""

PHASES = {FORWARD: "forward", LOSS: "loss", BACKWARD: "backward", OPTIMIZER: "optimizer step"}

_PERSISTENT = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "other_allocations": "other allocations",
}
_OTHER_PERSISTENT = "buffers and batch"
# At most this many are named, each with at least this part.
_MOST_TENANTS = 5
_LEAST_PART = 0.04


@dataclass(frozen=True, slots=True)
class AliveItem:
    """Bytes alive at a moment; equal values of identical layers are one item. `unit`: what made them, as in "layers.*"."""

    category: str
    name: str
    nbytes: int
    unit: str = ""


@dataclass(frozen=True, repr=False)
class PeakReport(ShownInNotebooks):
    """The storages alive at the peak of a step.

    Attributes:
        peak_bytes: predicted peak; the items add up to it.
        where: the phase and the unit, in words.
        items: sorted by category in the order of `CATEGORIES`, largest first within each.
    """

    peak_bytes: int
    where: str
    items: tuple[AliveItem, ...]

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes of each category present."""
        found: dict[str, int] = {}
        for item in self.items:
            found[item.category] = found.get(item.category, 0) + item.nbytes
        return found

    def tenants(self) -> list[str]:
        """Return what fills most of the peak, with amounts, the largest first; the values of a layer together.

        Example:
            >>> PeakReport(96, "backward of up", (AliveItem("parameters", "parameters", 96),)).tenants()
            ['parameters 96 B']
        """
        found = Counter[str]()
        for item in self.items:
            name = f"{item.category} {item.name}" if item.category == "working memory" else item.name
            found[f"{item.category} of {item.unit}" if item.unit else name] += item.nbytes
        largest = [(name, n) for name, n in found.most_common(_MOST_TENANTS) if n >= _LEAST_PART * self.peak_bytes]
        return [f"{name} {format_bytes(nbytes)}" for name, nbytes in largest]

    def __repr__(self) -> str:
        lines = [f"{format_bytes(self.peak_bytes)} alive at the peak: {self.where}"]
        for category, nbytes in self.by_category.items():
            inside = [item for item in self.items if item.category == category]
            lines.append(f"{format_bytes(nbytes):>10}  {category}")
            if [item.name for item in inside] != [category]:
                lines += [f"{format_bytes(item.nbytes):>22}  {item.name}" for item in inside]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Timeline(ShownInNotebooks):
    """Predicted memory over a step, moment by moment.

    Attributes:
        time_s: seconds since the step began. The optimizer's ops are not timed: its moments are all at the end.
        phases: a key of `PHASES` for each moment.
        calls: index in `paths` of the unit that runs, or whose values backward asked for last; -1 outside the units.
        bytes_of: bytes alive at each moment, by category.
        paths: module path of each run of a unit.
        plan: the plan whose memory this is.
        profile: the step.
        lives: each storage, and when it is made and freed.
        categories: the categories of `lives.storages`.
        peak: the moment of the peak.
        report: what is alive at the peak.
        host_bytes: bytes of offloaded values in host memory, or on their way there, at each moment.
    """

    time_s: NDArray[np.float64]
    phases: NDArray[np.int8]
    calls: NDArray[np.int32]
    bytes_of: Mapping[str, NDArray[np.int64]]
    paths: tuple[str, ...]
    plan: Plan
    profile: Profile
    lives: Lifetimes
    categories: tuple[str, ...]
    peak: int
    report: PeakReport
    host_bytes: NDArray[np.int64]

    @property
    def total_bytes(self) -> NDArray[np.int64]:
        """Bytes alive at each moment."""
        return _total(self.bytes_of)

    def where(self, moment: int) -> str:
        """Return what runs at a moment, such as "backward of layers.3"."""
        call = int(self.calls[moment])
        phase = PHASES[int(self.phases[moment])]
        return f"{phase} of {self.paths[call] or 'the model'}" if call >= 0 else phase


def timeline(profile: Profile, plan: Plan) -> Timeline:
    """Predict the memory of a step over time under a plan, by category.

    Args:
        profile: the recorded step.
        plan: any plan for that step.

    Returns:
        Every moment when something is made or freed, with the bytes alive and the running unit.

    Raises:
        ArgumentError: an argument is of the wrong type.

    Complexity: a few simulations; 32 layers take about 0.2 s.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> profile = recollect.record(model, torch.randn(8, 32), loss_fn=torch.sum, fake=True)
        >>> plan = recollect.classic_plan(profile, "full")
        >>> over_time = recollect.timeline(profile, plan)
        >>> int(over_time.total_bytes.max()) == plan.predicted_peak_bytes
        True
    """
    check_kind("timeline(profile, plan)", "profile", profile, Profile, "recollect.Profile")
    check_kind("timeline(profile, plan)", "plan", plan, Plan, "recollect.Plan")
    lives = lifetimes(profile, decide(profile, plan))
    categories = tuple(map(_Categories(lives).of, lives.storages))
    num_moments = len(lives.time_s)
    bytes_of = {category: np.zeros(num_moments + 1, dtype=np.int64) for category in CATEGORIES}
    for kind, nbytes in profile.persistent.items():
        bytes_of[_PERSISTENT.get(kind, _OTHER_PERSISTENT)][0] += nbytes
    for storage, category in zip(lives.storages, categories, strict=True):
        changes = bytes_of[category]
        changes[storage.born] += storage.nbytes
        if storage.died >= 0:
            changes[storage.died] -= storage.nbytes
    alive = {category: np.cumsum(changes)[:num_moments] for category, changes in bytes_of.items()}
    # As in the simulator: calibration was measured on forward and backward.
    alive["calibration"] += np.where(lives.phases == OPTIMIZER, 0, profile.calibration_bytes)
    total = _total(alive)
    peak = int(np.argmax(total))
    host_changes = np.zeros(num_moments, dtype=np.int64)
    for moment, nbytes in lives.host_changes:
        host_changes[moment] += nbytes
    where = lives.simulation.peak_note
    return Timeline(
        time_s=lives.time_s,
        phases=lives.phases,
        calls=lives.calls,
        bytes_of=alive,
        paths=tuple(call.path for call in profile.calls),
        plan=plan,
        profile=profile,
        lives=lives,
        categories=categories,
        peak=peak,
        report=PeakReport(int(total[peak]), where, _alive_at(profile, lives, categories, peak)),
        host_bytes=np.cumsum(host_changes),
    )


def explain_peak(profile: Profile, plan: Plan | None = None) -> PeakReport:
    """Return the values alive at the predicted peak of a step, and the peak's place in the step.

    Args:
        profile: the recorded step.
        plan: any plan for that step. Default: everything is kept.

    Returns:
        Items that add up to the plan's predicted peak, to the byte; prints as a table.

    Raises:
        ArgumentError: an argument is of the wrong type.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> profile = recollect.record(model, torch.randn(8, 32), loss_fn=torch.sum, fake=True)
        >>> report = recollect.explain_peak(profile)
        >>> sum(item.nbytes for item in report.items) == report.peak_bytes
        True
    """
    plan = Plan({}) if plan is None else plan
    check_kind("explain_peak(profile, plan)", "profile", profile, Profile, "recollect.Profile")
    check_kind("explain_peak(profile, plan)", "plan", plan, Plan, "recollect.Plan")
    return timeline(profile, plan).report


def _total(bytes_of: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.sum(np.stack(list(bytes_of.values())), axis=0)


class _Categories:
    def __init__(self, lives: Lifetimes) -> None:
        self._phases = lives.phases
        self._backwards, self._optimizers = (_begins(lives.phases == phase) for phase in (BACKWARD, OPTIMIZER))
        self._last_gradients = _last_gradients(lives, self._backwards)

    def of(self, storage: Lifetime) -> str:
        born_in = int(self._phases[storage.born])
        died = storage.died if storage.died >= 0 else len(self._phases)
        if storage.op is not None:
            return "working memory"
        if storage.recomputed:
            return "recomputed values" if storage.owner[0] >= 0 else "passing values"
        if storage.owner[0] == OUTSIDE:
            if storage.born in self._last_gradients:
                return "gradients"
            if born_in == BACKWARD:
                return "gradients" if died >= self._next(self._optimizers, storage.born) else "passing values"
            return "outside of the units" if born_in in (FORWARD, LOSS) else "passing values"
        if born_in == BACKWARD:
            return "returned values"
        return "kept values" if died > self._next(self._backwards, storage.born) else "passing values"

    def _next(self, begins: NDArray[np.int64], moment: int) -> int:
        """Return the first of these moments after a given one; the end of the step if there is none."""
        position = int(np.searchsorted(begins, moment, side="right"))
        return int(begins[position]) if position < len(begins) else len(self._phases)


def _last_gradients(lives: Lifetimes, backwards: NDArray[np.int64]) -> frozenset[int]:
    """Return the moments at which the last step's gradients begin: alive from the start, and freed as backward begins.

    So is its return value, such as a loss, if nothing says when that is replaced.
    """
    first_work = min((s.born for s in lives.storages if s.op is not None or s.owner[0] >= 0), default=0)
    born_at = {s.died: s.born for s in lives.storages if s.born < first_work and s.died >= 0}
    found = set()
    moment = int(backwards[0]) - 1 if len(backwards) else -1
    while moment in born_at:
        found.add(born_at[moment])
        moment -= 1
    return frozenset(found)


def _begins(is_phase: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.flatnonzero(is_phase & ~np.concatenate(([False], is_phase[:-1])))


def before_the_step(profile: Profile) -> list[AliveItem]:
    """Return the items alive all the time, and last, until the optimizer's step, the calibration."""
    items = [
        AliveItem(_PERSISTENT.get(kind, _OTHER_PERSISTENT), kind_text(kind), nbytes)
        for kind, nbytes in profile.persistent.items()
    ]
    return [*items, AliveItem("calibration", "measured beyond the simulation", profile.calibration_bytes)]


def _alive_at(profile: Profile, lives: Lifetimes, categories: Sequence[str], moment: int) -> tuple[AliveItem, ...]:
    items = before_the_step(profile)
    if lives.phases[moment] == OPTIMIZER:
        items.pop()
    paths_of: dict[tuple[str, str, str, str], dict[str, None]] = {}
    bytes_of: dict[tuple[str, str, str, str], int] = {}
    names = StorageNames(profile, lives)
    for storage, category in zip(lives.storages, categories, strict=True):
        if storage.born <= moment and not 0 <= storage.died <= moment:
            path = ""
            if storage.owner[0] >= 0:
                path = profile.calls[storage.owner[0]].path
            key = (category, re.sub(r"\d+", "*", path), names.classes.get(path, ""), names.of(storage, category))
            paths_of.setdefault(key, {})[path] = None
            bytes_of[key] = bytes_of.get(key, 0) + storage.nbytes
    for key, paths in paths_of.items():
        category, pattern, kind, name = key
        unit = (pattern if len(paths) > 1 else next(iter(paths))) + (f" ({kind})" if kind else "")
        label = label_paths(list(paths), names.classes)
        items.append(AliveItem(category, f"{label} {name}".strip(), bytes_of[key], unit))
    order = {category: number for number, category in enumerate(CATEGORIES)}
    items.sort(key=lambda item: (order[item.category], -item.nbytes, item.name))
    return tuple(item for item in items if item.nbytes)
