"""Compare recollect with megatron-core: bytes and ops of the same recompute settings on the same models.

    python benchmarks/megatron_core.py                # all models, about five minutes on one core
    python benchmarks/megatron_core.py --models llama

Every setting of megatron-core 0.16.1 that runs on a CPU (`megatron_core_shim.py` says what it takes), each in a process of its
own; and the same setting by `recollect.megatron_plan` on recollect's model of the same fields. What is counted:
`step_counts.py`. What came out: docs/megatron_core.md.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import megatron_core_shim as shim
import recollect
from flags import MachineFlags, RunFlags, parse
from megatron_core_models import CASES, VOCAB_SIZE, Case, Setting, Subject, megatron_subject, settings, tokens_of
from recollect.errors import RecollectError
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.measuring.meter import storage_bytes
from results_csv import Number, append
from step_counts import StepCounts, count_step
from step_in_child import ChildError, in_child
from tables import markdown


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags, RunFlags):
    """What to compare."""

    threads: int = 1
    """PyTorch's threads; counts do not depend on them."""
    models: tuple[str, ...] = tuple(CASES)
    """Models to run."""
    only: tuple[str, ...] = ()
    """Settings to count besides "none", such as "full uniform 2"; all if empty."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side's counts of a setting, and of no recompute."""

    counts: StepCounts
    plain: StepCounts

    @property
    def saved_bytes(self) -> int:
        """Bytes saved compared with no recompute, on the same side."""
        return self.plain.kept_bytes - self.counts.kept_bytes

    @property
    def peak_fall_bytes(self) -> int:
        """How far the peak is below that without recompute."""
        return self.plain.peak_bytes - self.counts.peak_bytes

    @property
    def ops_again(self) -> int:
        """Number of recomputed ops."""
        return sum(self.counts.ops_again(self.plain).values())

    @property
    def flop_again(self) -> int:
        """FLOPs of recomputed matrix products."""
        return self.counts.backward_flop - self.plain.backward_flop


@dataclass(kw_only=True)
class Row:
    """The counts of a setting on both sides, or the reason why a side failed."""

    case: str
    setting: str
    sides: dict[str, Side] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def behind(self) -> list[str]:
        """Return the counts in which recollect is worse than megatron-core.

        Bytes kept and the peak count as more if they are more, and also less is saved against the side's own step without
        recompute: the two models differ in a few KiB outside of their layers.
        """
        if len(self.sides) < 2 or self.setting == "none":
            return []
        ours, theirs = self.sides["recollect"], self.sides["megatron-core"]
        worse = {
            "keeps more bytes": ours.counts.kept_bytes > theirs.counts.kept_bytes
            and ours.saved_bytes < theirs.saved_bytes,
            "recomputes more ops": ours.ops_again > theirs.ops_again,
            "recomputes more FLOP": ours.flop_again > theirs.flop_again,
            "peaks higher": ours.counts.peak_bytes > theirs.counts.peak_bytes
            and ours.peak_fall_bytes < theirs.peak_fall_bytes,
            "other gradients": ours.counts.first_difference(ours.plain) is not None,
        }
        return [what for what, is_worse in worse.items() if is_worse]


def recollect_subject(case: Case) -> Subject:
    """Build recollect's model of the same fields."""
    torch.manual_seed(0)
    sizes = TransformerConfig(
        **case.fields, vocab_size=VOCAB_SIZE, max_position_embeddings=case.seq_length, core_attention="unfused"
    )
    model: Any = GPTModel(sizes).train()
    if case.is_bf16:
        model = model.to(torch.bfloat16)
    tokens, labels = tokens_of(case)

    def seed() -> None:
        torch.manual_seed(0)

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(tokens, labels).loss
        return loss

    return Subject(model=model, forward=forward, reset=seed, table_bytes=lambda: _table_bytes(model, case))


def _table_bytes(model: GPTModel, case: Case) -> int:
    """Return the bytes of the rotary angles, which recollect's model computes once per step for all layers."""
    if model.rotary_pos_emb is None:
        return 0
    dtype = torch.bfloat16 if case.is_bf16 else torch.float32
    made = model.rotary_pos_emb(torch.zeros(1, case.seq_length, 1, dtype=dtype))
    return storage_bytes(one for one in made if isinstance(one, torch.Tensor))


def recollect_counts(case: Case, chosen: list[Setting]) -> Iterator[tuple[Setting, StepCounts | str]]:
    """Count all settings of a case for recollect."""
    subject = recollect_subject(case)
    tokens, labels = tokens_of(case)
    profile = recollect.record(
        subject.model, {"tokens": tokens, "labels": labels}, holds_output=False, gradients="accumulated"
    )
    for setting in chosen:
        try:
            plan = megatron_plan(profile, RecomputeConfig(**setting.fields))
        except RecollectError as error:
            yield setting, f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        with recollect.apply(subject.model, plan):
            yield setting, count_step(subject.model, subject.forward, subject.reset, subject.table_bytes)


def megatron_counts(case: Case, chosen: list[Setting]) -> Iterator[tuple[Setting, StepCounts | str]]:
    """Count all settings of a case for megatron-core."""

    def count(setting: Setting) -> StepCounts:
        subject = megatron_subject(case, setting)
        return count_step(subject.model, subject.forward, subject.reset, subject.table_bytes)

    for setting in chosen:
        try:
            yield setting, in_child(lambda setting=setting: count(setting))  # type: ignore[misc]
        except ChildError as error:
            yield setting, str(error)


def compare(name: str, only: Sequence[str]) -> list[Row]:
    """Count both sides of one case; `only`: settings besides "none", all if empty."""
    case = CASES[name]
    chosen = [setting for setting in settings(case) if not only or setting.name in {"none", *only}]
    rows = {setting.name: Row(case=name, setting=setting.name) for setting in chosen}
    for side, found in (("recollect", recollect_counts), ("megatron-core", megatron_counts)):
        plain: StepCounts | None = None
        for setting, counts in found(case, chosen):
            if isinstance(counts, str):
                rows[setting.name].failures[side] = counts
                continue
            plain = plain or counts
            rows[setting.name].sides[side] = Side(counts=counts, plain=plain)
    return list(rows.values())


def table(rows: list[Row]) -> str:
    """Format the rows of one case as a table."""
    header = ("setting", "kept", "saved", "peak", "ops again", "MFLOP again", "Megatron: kept", "saved", "peak")
    return markdown([_cells(row) for row in rows], (*header, "ops again", "MFLOP again", "recollect"))


def _cells(row: Row) -> tuple[str, ...]:
    cells: list[str] = [row.setting]
    for side in ("recollect", "megatron-core"):
        if side not in row.sides:
            cells += [f"fails: {row.failures[side]}", "", "", "", ""]
            continue
        found = row.sides[side]
        sizes = (found.counts.kept_bytes, found.saved_bytes, found.counts.peak_bytes)
        cells += [f"{nbytes / 1024:,.0f}" for nbytes in sizes]
        cells += [str(found.ops_again), f"{found.flop_again / 1e6:.0f}"]
    return (*cells, ", ".join(row.behind) or ("" if row.setting == "none" else "ok"))


def numbers(row: Row) -> list[Number]:
    """Return the row as results."""
    found = []
    for side, counted in row.sides.items():
        name = f"{row.case} / {row.setting} / {side}"
        found += [
            Number("kept", "bytes", name, counted.counts.kept_bytes),
            Number("saved", "bytes", name, counted.saved_bytes),
            Number("peak", "bytes", name, counted.counts.peak_bytes),
            Number("ops_again", "1", name, counted.ops_again),
            Number("flop_again", "FLOP", name, counted.flop_again),
            Number("gradients_equal", "bool", name, int(counted.counts.first_difference(counted.plain) is None)),
        ]
    for side, reason in row.failures.items():
        found.append(Number("failed", "text", f"{row.case} / {row.setting} / {side}", reason))
    return found


def main(flags: Flags) -> None:
    """Compare, print the tables, and append the numbers to results/megatron_core.csv."""
    torch.set_num_threads(flags.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    shim.install()
    for name in flags.models:
        rows = compare(name, flags.only)
        case = CASES[name]
        print(
            f"\n### {case.description}\n\n{case.batch_size} x {case.seq_length} tokens, KiB.\n\n{table(rows)}",
            flush=True,
        )
        config = {**asdict(flags), "models": name, "only": list(flags.only), "out": str(flags.out.name)}
        append(flags.out / "megatron_core.csv", [number for row in rows for number in numbers(row)], config)


if __name__ == "__main__":
    main(parse(Flags))
