"""Benchmark results as data: one row per setting, the JSON document that holds them, and comparisons. Imports no torch.

Results are compared with stored ("golden") ones: which settings are slower, larger, faster, or no longer fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from recollect.byte_format import format_bytes
from recollect.errors import BenchError
from recollect.fields import read_document
from recollect.warning import warn_user

Result = Literal["ok", "faster", "perf regression", "memory regression", "OOM", "OOM (predicted)"]
"""OOM: the step ran out of memory, or its measured peak exceeds the limit. Predicted: it was expected to, and did not run."""

_FORMAT = "recollect.bench"
_VERSION = 1
_SHOWN = 3  # differences, of which there may be many


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one setting."""

    name: str
    """The setting, in a few words."""
    fields: Mapping[str, Any]
    """The setting as a mapping of Megatron's names."""
    result: Result = "ok"
    """The outcome, compared with a golden result if there is one."""
    note: str = ""
    versus_golden: float | None = None
    """Model FLOP/s relative to the golden result, minus one; None without a golden result."""
    golden_name: str = ""
    predicted_peak_bytes: int | None = None
    predicted_slowdown: float | None = None
    """Predictions of the plan; the slowdown is of forward and backward."""
    peak_bytes: int | None = None
    """Measured peak of everything the step holds."""
    reserved_bytes: int | None = None
    """Largest memory held by CUDA's caching allocator; None on a CPU."""
    step_s: float | None = None
    step_p20_s: float | None = None
    step_p80_s: float | None = None
    """Median step time, 20th and 80th percentile."""
    slowdown: float | None = None
    slowdown_p20: float | None = None
    slowdown_p80: float | None = None
    """The same for the ratio to the adjacent reference steps, minus one."""
    model_flops: float = 0.0
    hardware_flops: float | None = None
    """FLOPs of a step."""
    num_tokens: int = 0

    def __post_init__(self) -> None:
        if self.step_s is not None and self.step_s <= 0:
            raise ValueError(f"step_s: got {self.step_s}, expected a number of seconds above 0")

    @property
    def tflops(self) -> float | None:
        """Model TFLOP/s of the device; None if no step was timed."""
        return None if self.step_s is None else self.model_flops / self.step_s / 1e12

    @property
    def hardware_tflops(self) -> float | None:
        if self.step_s is None or self.hardware_flops is None:
            return None
        return self.hardware_flops / self.step_s / 1e12

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.step_s is None else self.num_tokens / self.step_s

    @property
    def is_oom(self) -> bool:
        return self.result in ("OOM", "OOM (predicted)")


@dataclass(frozen=True, kw_only=True)
class BenchResults:
    """The results of all settings, and the conditions that they depend on."""

    workload: Mapping[str, Any]
    """The model and the step; only results of the same workload are comparable."""
    machine: Mapping[str, Any]
    """The machine; only results of the same machine are comparable."""
    versions: Mapping[str, Any]
    """Versions of torch, recollect and Python; results of different versions are comparable."""
    rounds: int
    reference: str
    """Name of the setting that slowdowns refer to."""
    rows: tuple[Row, ...]
    memory_limit_bytes: int | None = None
    """Peaks above this count as OOM."""
    threshold: float = 0.05
    """Relative difference to the golden result that counts as regression, or as faster."""
    golden: str = ""
    """File of the golden results; empty without."""

    @property
    def has_regression(self) -> bool:
        """Whether a setting is slower or larger than its golden result allows, or no longer fits."""
        regressions = ("perf regression", "memory regression")
        return any(row.result in regressions or (row.is_oom and row.golden_name == row.name) for row in self.rows)

    def to_json(self) -> str:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        rows = [{**asdict(row), "fields": dict(row.fields)} for row in self.rows]
        return json.dumps({"format": _FORMAT, "version": _VERSION, **numbers, "rows": rows}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> BenchResults:
        root = read_document(text, format=_FORMAT, version=_VERSION, error=BenchError, needs_all_keys=True)
        return root.record(cls)

    @classmethod
    def load(cls, path: Path) -> BenchResults:
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as problem:
            raise BenchError(
                f"golden results {path}: cannot be read ({problem.strerror}), expected a file written by --save-golden."
            ) from None
        except (BenchError, UnicodeDecodeError) as problem:
            raise BenchError(f"golden results {path}: {problem}") from None


def check_comparable(
    golden: BenchResults,
    path: Path,
    *,
    workload: Mapping[str, Any],
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
) -> None:
    """Check that stored results belong to the step and machine to be measured, and warn of other versions.

    Comparing versions may be the point.
    """
    for what, stored, now in (("model or step", golden.workload, workload), ("machine", golden.machine, machine)):
        if found := differences(stored, now):
            raise BenchError(
                f"golden results {path}: from another {what} ({found}), expected the same one. Measure new ones with "
                "--save-golden, or change the flags."
            )
    if found := differences(golden.versions, versions):
        warn_user(f"golden results {path}: measured with other versions ({found}), which may explain differences.")


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the differences between two mappings, with dotted names for nested ones; empty if there are none."""
    before, after = _flat(stored), _flat(now)
    missing = "nothing"
    found = [
        f"{key}: stored {before.get(key, missing)}, now {after.get(key, missing)}"
        for key in {**before, **after}
        if before.get(key, missing) != after.get(key, missing)
    ]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            # JSON has lists only.
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def compared(results: BenchResults, golden: BenchResults, *, path: Path, threshold: float) -> BenchResults:
    """Return the results with each setting compared with its golden result.

    A setting without a golden result of its name is compared with the golden reference, as the recipes of Megatron-Bridge
    compare every experiment with the single golden value of the workload.
    """
    stored = {row.name: row for row in golden.rows}
    reference = stored.get(golden.reference)
    rows = []
    for row in results.rows:
        old = stored.get(row.name, reference)
        if old is not None and old.name == row.name and old.tflops is None:
            rows.append(row if row.is_oom else replace(row, note="did not fit when the golden results were measured"))
            continue
        if old is None or old.tflops is None:
            raise BenchError(
                f"golden results {path}: no times for {row.name!r} nor for the reference {golden.reference!r}, expected one "
                "of the two. Measure them with --save-golden."
            )
        rows.append(_against(row, old, old.tflops, threshold))
    return replace(results, rows=tuple(rows), threshold=threshold, golden=str(path))


def _against(row: Row, old: Row, old_tflops: float, threshold: float) -> Row:
    row = replace(row, golden_name=old.name)
    if row.tflops is None:
        return row
    versus, peak_bytes = row.tflops / old_tflops - 1, old.peak_bytes or 0
    result: Result = "ok"
    note = row.note
    if versus < -threshold:
        result = "perf regression"
    elif old.name == row.name and 0 < peak_bytes * (1 + threshold) < (row.peak_bytes or 0):
        # Peaks of different settings may differ.
        result, note = "memory regression", f"peak was {format_bytes(peak_bytes)}"
    elif versus > threshold:
        result = "faster"
    return replace(row, versus_golden=versus, result=result, note=note)
