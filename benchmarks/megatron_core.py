"""Compare recollect with megatron-core on megatron-core's own models: bytes, ops and FLOPs of its recompute settings.

    python benchmarks/megatron_core.py                # all models, about three minutes on one core
    python benchmarks/megatron_core.py --page         # and writes the tables into docs/megatron_core.md
    python benchmarks/megatron_core.py --models llama

Each setting runs in megatron-core on a CPU (`megatron_core_shim.py` says what that takes), in a process of its own. A step of
the model without recompute is recorded, and the model runs under two plans for each setting: `recollect.megatron_plan` of that
setting, and `recollect.plan` with the peak that megatron-core reached as its budget. What is counted: `step_counts.py`.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

import megatron_core_shim as shim
import recollect
from flags import MachineFlags, RunFlags, parse
from megatron_core_models import CASES, Case, Setting, megatron_subject, settings
from recollect.errors import RecollectError
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from results_csv import Number, append
from step_counts import StepCounts, count_step, resident_bytes
from step_in_child import ChildError, in_child
from tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "megatron_core.md"

MEGATRON = "megatron-core"
# recollect's sides, and how much higher than Megatron's its peak may be.
SAME_SETTING, SAME_PEAK = "same setting", "same peak"
PEAK_RATIO = {SAME_SETTING: 1.01, SAME_PEAK: 1.0}

Found: TypeAlias = StepCounts | str
"""The counts of a setting, or the reason why it failed."""


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags, RunFlags):
    """What to compare."""

    threads: int = 1
    """PyTorch's threads; counts do not depend on them."""
    models: tuple[str, ...] = tuple(CASES)
    """Models to run."""
    only: tuple[str, ...] = ()
    """Settings to count besides "none", such as "full uniform 2"; all if empty."""
    page: bool = False
    """Write the tables into the page; only for all models and settings."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side's counts of a setting, and megatron-core's of no recompute."""

    counts: StepCounts
    plain: StepCounts

    @property
    def ops_again(self) -> int:
        """Number of recomputed ops."""
        return sum(self.counts.ops_again(self.plain).values())

    @property
    def flop_again(self) -> int:
        """FLOPs of recomputed matrix products."""
        return self.counts.backward_flop - self.plain.backward_flop

    @property
    def has_plain_gradients(self) -> bool:
        """Whether loss and gradients have the bits that they have without recompute."""
        return self.counts.first_difference(self.plain) is None


@dataclass(kw_only=True)
class Row:
    """The counts of a setting by side, and the reasons why sides failed."""

    case: Case
    setting: str
    sides: dict[str, Side] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def behind(self, name: str) -> list[str]:
        """Return what recollect promises of a side and does not hold."""
        if name in self.failures:
            return ["fails"]
        if name not in self.sides:
            return []
        ours, theirs = self.sides[name], self.sides.get(MEGATRON)
        broken = {"other gradients": not ours.has_plain_gradients}
        if theirs is not None:
            broken["peaks higher"] = ours.counts.peak_bytes > PEAK_RATIO[name] * theirs.counts.peak_bytes
            broken["more FLOP again"] = ours.flop_again > theirs.flop_again
            # megatron-core ignores `moe_act` where experts run one after another.
            keeps_as_much = ours.counts.kept_bytes > 0.99 * theirs.counts.kept_bytes
            broken["more ops again"] = name == SAME_SETTING and keeps_as_much and ours.ops_again > theirs.ops_again
        return [what for what, is_broken in broken.items() if is_broken]


def compare(case: Case, only: Sequence[str] = ()) -> list[Row]:
    """Count all sides of one case; `only`: settings besides "none", all if empty."""
    chosen = [setting for setting in settings(case) if not only or setting.name in {"none", *only}]
    theirs = {setting.name: _megatron_counts(case, setting) for setting in chosen}
    plain = theirs["none"]
    if isinstance(plain, str):
        raise RuntimeError(f"{case.description}: megatron-core's step without recompute failed: {plain}")
    peaks = {name: found.peak_bytes for name, found in theirs.items() if isinstance(found, StepCounts)}
    rows = {s.name: Row(case=case, setting=s.name) for s in chosen}
    ours = in_child(lambda: list(_recollect_counts(case, chosen, peaks)), limit_s=600)
    for name, side, found in [*((name, MEGATRON, found) for name, found in theirs.items()), *ours]:
        if isinstance(found, str):
            rows[name].failures[side] = found
        else:
            rows[name].sides[side] = Side(counts=found, plain=plain)
    return list(rows.values())


def _megatron_counts(case: Case, setting: Setting) -> Found:
    """Count a setting of megatron-core's, in a process of its own."""

    def count() -> StepCounts:
        one = megatron_subject(case, setting)
        resident = resident_bytes(one.model, one.forward, one.reset, one.table_bytes)
        return count_step(one.model, one.forward, one.reset, resident)

    try:
        return in_child(count)
    except ChildError as error:
        return str(error)


def _recollect_counts(
    case: Case, chosen: Sequence[Setting], peaks: Mapping[str, int]
) -> Iterator[tuple[str, str, Found]]:
    """Count the settings and the budgets (`peaks`, by setting) on megatron-core's model without recompute."""
    subject = megatron_subject(case, Setting(name="none"))
    resident = resident_bytes(subject.model, subject.forward, subject.reset, subject.table_bytes)
    profile = recollect.record(subject.model, None, step=lambda: subject.forward().backward())

    def counts(make: Callable[[], recollect.Plan]) -> Found:
        try:
            plan = make()
        except RecollectError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        with recollect.apply(subject.model, plan):
            return count_step(subject.model, subject.forward, subject.reset, resident)

    keep_all = megatron_plan(profile, RecomputeConfig())
    for setting in chosen:
        yield setting.name, SAME_SETTING, counts(lambda s=setting: megatron_plan(profile, RecomputeConfig(**s.fields)))  # type: ignore[misc]
        if setting.name in peaks and setting.name != "none":
            # The profile counts parameters and gradients too.
            budget = (keep_all.predicted_peak_bytes or 0) - peaks["none"] + peaks[setting.name]
            yield setting.name, SAME_PEAK, counts(lambda b=budget: recollect.plan(profile, b))  # type: ignore[misc]


def table(rows: Sequence[Row]) -> str:
    """Format the rows of one case as a table."""
    counted = ("kept a layer", "peak", "ops again", "MFLOP again")
    header = ["setting"]
    for side in ("Megatron", SAME_SETTING, SAME_PEAK):
        header += [f"{side}: {counted[0]}", *counted[1:]]
    return markdown([_cells(row) for row in rows], [*header, "recollect"])


def _cells(row: Row) -> list[str]:
    cells = [row.setting]
    for name in (MEGATRON, SAME_SETTING, SAME_PEAK):
        if name not in row.sides:
            reason = row.failures.get(name)
            cells += [f"fails: {reason.partition(':')[0]}" if reason else "", "", "", ""]
            continue
        side = row.sides[name]
        kept_bytes = side.counts.kept_bytes / row.case.num_layers
        cells += [f"{nbytes / 1024:,.0f}" for nbytes in (kept_bytes, side.counts.peak_bytes)]
        cells += [str(side.ops_again), f"{side.flop_again / 1e6:.0f}"]
    behind = [f"{name}: {what}" for name in PEAK_RATIO for what in row.behind(name)]
    return [*cells, ", ".join(behind) or ("" if row.setting == "none" else "ok")]


def numbers(model: str, row: Row) -> list[Number]:
    """Return the row as results."""
    found = []
    for name, side in row.sides.items():
        contestant = f"{model} / {row.setting} / {name}"
        found += [
            Number("kept", "bytes", contestant, side.counts.kept_bytes),
            Number("peak", "bytes", contestant, side.counts.peak_bytes),
            Number("ops_again", "1", contestant, side.ops_again),
            Number("flop_again", "FLOP", contestant, side.flop_again),
            Number("gradients_equal", "bool", contestant, int(side.has_plain_gradients)),
        ]
    for name, reason in row.failures.items():
        found.append(Number("failed", "text", f"{model} / {row.setting} / {name}", reason))
    return found


def start() -> None:
    """Make megatron-core run here, imported once for all processes that are forked; its objects are not collected again."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    shim.install()
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    gc.collect()
    gc.freeze()


def main(flags: Flags) -> None:
    """Compare, print the tables, append the numbers to results/megatron_core.csv, and write the page if asked to."""
    if flags.page and (flags.only or flags.models != tuple(CASES)):
        raise SystemExit("--page: the page has all models and settings. Leave out --models and --only.")
    torch.set_num_threads(flags.threads)
    start()
    sections = []
    for name in flags.models:
        case = CASES[name]
        rows = compare(case, flags.only)
        sections.append(f"\n## {case.description}\n\n{table(rows)}\n")
        print(sections[-1], flush=True)
        config = {**asdict(flags), "models": name, "only": list(flags.only), "out": flags.out.name}
        config["megatron-core"] = importlib.metadata.version("megatron-core")
        append(flags.out / "megatron_core.csv", [one for row in rows for one in numbers(name, row)], config)
    if flags.page:
        before = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
        PAGE.write_text("".join([before.rstrip() + "\n", *sections]), encoding="utf-8")


if __name__ == "__main__":
    main(parse(Flags))
