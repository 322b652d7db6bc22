"""What was measured, as data: one row a setting, and the document around them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from recollect.errors import BenchError
from recollect.fields import Field, read_document

__all__ = ["BenchResults", "Result", "Row"]

Result = Literal["ok", "faster", "perf regression", "memory regression", "OOM", "OOM (predicted)"]
"""OOM: the step ran out of memory, or its measured peak is above the limit. Predicted: it was not run for that reason."""
REGRESSIONS: tuple[Result, ...] = ("perf regression", "memory regression")

_FORMAT = "recollect.bench"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting.

    Attributes:
        name: the setting, in a few words.
        fields: the setting as a mapping of Megatron's names.
        result: how it went; compared with a golden result if there is one.
        note: why, in words, where there is more to say.
        versus_golden: model FLOP/s over those of the golden result, less one; None without one.
        golden_name: the setting of the golden result that it was compared with.
        predicted_peak_bytes, predicted_slowdown: of the plan; the slowdown is of forward and backward.
        peak_bytes: measured, everything that the step holds.
        reserved_bytes: most bytes that CUDA's caching allocator held; None on a CPU, which has none.
        step_s, step_p20_s, step_p80_s: median seconds of a step, and 20th and 80th percentile.
        slowdown, slowdown_p20, slowdown_p80: the same of the ratio to the reference's steps right before and after, less one.
        model_flops, hardware_flops: of a step.
        num_tokens: of a step.
    """

    name: str
    fields: Mapping[str, Any]
    result: Result = "ok"
    note: str = ""
    versus_golden: float | None = None
    golden_name: str = ""
    predicted_peak_bytes: int | None = None
    predicted_slowdown: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    step_s: float | None = None
    step_p20_s: float | None = None
    step_p80_s: float | None = None
    slowdown: float | None = None
    slowdown_p20: float | None = None
    slowdown_p80: float | None = None
    model_flops: float = 0.0
    hardware_flops: float | None = None
    num_tokens: int = 0

    @property
    def tflops(self) -> float | None:
        """Model TFLOP/s of the device; None if no step was timed."""
        return None if self.step_s is None else self.model_flops / self.step_s / 1e12

    @property
    def hardware_tflops(self) -> float | None:
        """Hardware TFLOP/s of the device: what is recomputed counts; None if no step was timed."""
        if self.step_s is None or self.hardware_flops is None:
            return None
        return self.hardware_flops / self.step_s / 1e12

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None if no step was timed."""
        return None if self.step_s is None else self.num_tokens / self.step_s

    @property
    def is_oom(self) -> bool:
        """Whether it did not fit."""
        return self.result in ("OOM", "OOM (predicted)")


@dataclass(frozen=True, kw_only=True)
class BenchResults:
    """All settings of one run, and what their numbers depend on.

    Attributes:
        workload: the model and the step; results of another workload cannot be compared.
        machine: where times were taken; those of another machine cannot be compared, either.
        versions: of what may well be compared: torch, recollect, Python.
        rounds: that each median is of.
        reference: name of the setting that slowdowns are over.
        memory_limit_bytes: above which a peak counts as OOM.
        rows: by setting, in the order they were asked for.
        threshold: relative difference to the golden result from which on it is a regression, or faster.
        golden: the file that was compared with; empty if none was.
    """

    workload: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    rounds: int
    reference: str
    rows: tuple[Row, ...]
    memory_limit_bytes: int | None = None
    threshold: float = 0.05
    golden: str = ""

    @property
    def has_regression(self) -> bool:
        """Whether a setting is slower or larger than its golden result allows, or does not fit where that did."""
        return any(row.result in REGRESSIONS or (row.is_oom and row.golden_name == row.name) for row in self.rows)

    def to_json(self) -> str:
        """Return the document; `from_json` reads it back."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        rows = [{**asdict(row), "fields": dict(row.fields)} for row in self.rows]
        return json.dumps({"format": _FORMAT, "version": _VERSION, **numbers, "rows": rows}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> BenchResults:
        """Read results.

        Raises:
            BenchError: no JSON, another format or version, an unknown key, or a wrong type; says where.
        """
        root = read_document(text, format=_FORMAT, version=_VERSION, error=BenchError)
        root.keys(allowed=["format", "version", *(f.name for f in fields(cls))])
        limit = root.find("memory_limit_bytes")
        return cls(
            workload=_mapping(root.get("workload")),
            machine=_mapping(root.get("machine")),
            versions=_mapping(root.get("versions")),
            rounds=root.get("rounds").integer(least=0),
            reference=root.get("reference").text(),
            rows=tuple(_row(place) for place in root.get("rows").array()),
            memory_limit_bytes=None if limit is None else limit.integer(least=0),
            threshold=root.get("threshold").number(),
            golden=root.get("golden").text(),
        )

    @classmethod
    def load(cls, path: Path) -> BenchResults:
        """Read a file of results.

        Raises:
            BenchError: it cannot be read, or is no such file; names it.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as problem:
            raise BenchError(
                f"golden results {path}: cannot be read ({problem.strerror}), expected a file that --save-golden wrote."
            ) from None
        except (BenchError, UnicodeDecodeError) as problem:
            raise BenchError(f"golden results {path}: {problem}") from None

    def with_rows(self, rows: tuple[Row, ...], **changes: Any) -> BenchResults:
        """Return the same results with other rows."""
        return replace(self, rows=rows, **changes)


_OPTIONAL_NUMBERS = (
    *("versus_golden", "predicted_slowdown", "hardware_flops"),
    *("step_s", "step_p20_s", "step_p80_s", "slowdown", "slowdown_p20", "slowdown_p80"),
)
_OPTIONAL_BYTES = ("predicted_peak_bytes", "peak_bytes", "reserved_bytes")


def _row(place: Field) -> Row:
    place.keys(allowed=[f.name for f in fields(Row)])
    numbers = {name: found.number() for name in _OPTIONAL_NUMBERS if (found := place.find(name)) is not None}
    sizes = {name: found.integer(least=0) for name in _OPTIONAL_BYTES if (found := place.find(name)) is not None}
    result = place.get("result")
    if result.data not in get_args(Result):
        result.fail(" or ".join(get_args(Result)))
    if numbers.get("step_s", 1.0) <= 0:
        place.get("step_s").fail("a number of seconds above 0")
    return Row(
        name=place.get("name").text(),
        fields=_mapping(place.get("fields")),
        result=cast(Result, result.data),
        note=place.get("note").text(),
        golden_name=place.get("golden_name").text(),
        model_flops=place.get("model_flops").number(),
        num_tokens=place.get("num_tokens").integer(least=0),
        **cast(Any, {**numbers, **sizes}),
    )


def _mapping(place: Field) -> dict[str, Any]:
    return {key: place.get(key).data for key in place.keys()}
