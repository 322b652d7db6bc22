"""Compare results with stored ("golden") results: which settings are slower, larger, faster, or no longer fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recollect.byte_format import format_bytes
from recollect.errors import BenchError
from recollect.lab.bench.results import BenchResults, Result, Row
from recollect.warning import warn_user

__all__ = ["check_comparable", "compared", "differences", "warn_of_versions"]

_SHOWN = 3


def check_comparable(
    golden: BenchResults, path: Path, *, workload: Mapping[str, Any], machine: Mapping[str, Any]
) -> None:
    """Check that stored results belong to the step and machine to be measured.

    Raises:
        BenchError: names what differs.
    """
    for what, stored, now in (("model or step", golden.workload, workload), ("machine", golden.machine, machine)):
        found = differences(stored, now)
        if found:
            raise BenchError(
                f"golden results {path}: from another {what} ({found}), expected the same one. Measure new ones with "
                "--save-golden, or change the flags."
            )


def warn_of_versions(golden: BenchResults, path: Path, versions: Mapping[str, Any]) -> None:
    """Warn if stored results were measured with other versions; comparing versions may be the point."""
    found = differences(golden.versions, versions)
    if found:
        warn_user(
            f"golden results {path}: measured with other versions ({found}), which may explain differences.",
        )


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the differences between two mappings, with dotted names for nested ones; empty if there are none.

    Example:
        >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}})
        'a.b: stored 1, now 3'
    """
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
    compare every experiment with the one golden value of the workload.

    Args:
        results: the new results.
        golden: the stored results.
        path: file of the stored results, for messages.
        threshold: smallest relative difference that counts; 0.05 is 5 %.

    Raises:
        BenchError: no golden result has a setting's name, and the golden reference has no times.
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
    return results.with_rows(tuple(rows), threshold=threshold, golden=str(path))


def _against(row: Row, old: Row, old_tflops: float, threshold: float) -> Row:
    row = replace(row, golden_name=old.name)
    if row.tflops is None:
        return row
    versus = row.tflops / old_tflops - 1
    result: Result = "ok"
    note = row.note
    if versus < -threshold:
        result = "perf regression"
    elif old.name == row.name and _grew(row, old, threshold):
        # Peaks of different settings may differ.
        result, note = "memory regression", f"peak was {format_bytes(old.peak_bytes or 0)}"
    elif versus > threshold:
        result = "faster"
    return replace(row, versus_golden=versus, result=result, note=note)


def _grew(row: Row, old: Row, threshold: float) -> bool:
    return bool(row.peak_bytes and old.peak_bytes and row.peak_bytes > old.peak_bytes * (1 + threshold))
