"""Defines `Plan`: the action for each value of each unit between its forward and its backward.

A `Plan` is immutable, the same for every run, and written as JSON that people can read and edit. A kept value stays in
memory while something needs it; a recomputed value is dropped and computed again when backward asks for it. Values that
a plan does not name are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from recollect.byte_format import format_bytes
from recollect.errors import PlanError, PlanFormatError
from recollect.fields import Field, read_document, read_file, writing
from recollect.notebooks import ShownInNotebooks
from recollect.plans.action import Action, EngineChoice
from recollect.plans.paths import compress_paths, expand_classes, expand_paths, is_plain
from recollect.plans.text import changed_units, layout, unit_rows, wrap
from recollect.plans.trip import Trip
from recollect.plans.unit_plan import UnitPlan

_COLUMNS = 80
_FORMAT = "recollect.plan"
_SAME_PLAN = (EngineChoice.TAPE, EngineChoice.GRAPH)
# 2: a plan that offloads. One that does not is written as version 1, which every reader knows.
_VERSION = 2


@dataclass(frozen=True, repr=False)
class Plan(ShownInNotebooks):
    """The values that every unit keeps, the budget, and the predicted peak and slowdown.

    Attributes:
        units: unit plans by module path, in forward order. Units that are not named keep everything.
        budget_bytes: the requested bound on the peak of the whole step.
        predicted_peak_bytes: simulated peak of the whole step.
        predicted_slowdown: recompute time divided by the time of forward and backward without it; 0.03 is 3 %. With compiled
            units, against the step in which these keep PyTorch's choice; it may then be below 0.
        bound_slowdown: lower bound on the slowdown of any plan within the budget.
        note: where the plan comes from, as text.
        torch_version, device_name: as in the profile that the plan was made from; empty if they do not matter, such
            as the device of a fake profile. `apply` compares them with its own.
        loss_chunks: number of parts in which the output matrix and loss are computed. Only one part's logits are alive at
            a time; 1 leaves them as the model computes them.
        host_budget_bytes: the requested bound on values in host memory; None if none may be there.
        predicted_host_bytes: simulated most bytes of offloaded values in host memory at once; None if none are.
        to_host_bytes_per_s, from_host_bytes_per_s: the rates of copies that the plan was made for.
        host_wait_slowdown: the part of `predicted_slowdown` in which the step waits for copies.
        slowdown_error: by how much the measured slowdown differs from `predicted_slowdown` in one of ten steps; None if
            that is unknown, as for modelled times.
        class_names: of modules that have a number for a name, as in an `nn.Sequential`: (path, class), in which a path may
            have a range. Only shown next to the names.
        source: a weak reference to the profile that the plan was made from, whose memory a notebook then draws. It is not
            part of the plan: not compared, and not in its files.

    Raises:
        PlanError: a negative number of bytes, a slowdown that is negative or not finite, or fewer than one chunk.

    Example:
        >>> lean = UnitPlan({"norm.mul": "recompute", "mlp.up.mm": "keep", "mlp.act.silu": "recompute"})
        >>> plan = Plan({"layers.0": lean, "layers.1": lean}, budget_bytes=2**30, predicted_peak_bytes=2**29)
        >>> print(plan)
        layers.0-1  keep       up
                    recompute  all else
        all others  keep all
        predicted peak 512.0 MiB, budget 1.0 GiB
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    units: Mapping[str, UnitPlan]
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_slowdown: float | None = None
    bound_slowdown: float | None = None
    note: str = ""
    torch_version: str = ""
    device_name: str = ""
    loss_chunks: int = 1
    host_budget_bytes: int | None = None
    predicted_host_bytes: int | None = None
    to_host_bytes_per_s: float | None = None
    from_host_bytes_per_s: float | None = None
    host_wait_slowdown: float | None = None
    slowdown_error: float | None = None
    class_names: tuple[tuple[str, str], ...] = ()
    source: Callable[[], Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", MappingProxyType(dict(self.units)))
        for path, unit in self.units.items():
            if not isinstance(unit, UnitPlan):
                raise PlanError(f"unit {path!r}: got a {type(unit).__name__}, expected a recollect.UnitPlan")
        for name in ("budget_bytes", "predicted_peak_bytes", "host_budget_bytes", "predicted_host_bytes"):
            nbytes = getattr(self, name)
            if nbytes is not None and nbytes < 0:
                raise PlanError(f"{name}: got {nbytes}, expected 0 or more")
        # Where units were compiled for the profile, others may be faster than with the compiler's own choice.
        least = {"predicted_slowdown": -1}
        for name in ("predicted_slowdown", "bound_slowdown", "host_wait_slowdown", "slowdown_error"):
            slowdown = getattr(self, name)
            if slowdown is not None and not (math.isfinite(slowdown) and slowdown >= least.get(name, 0)):
                raise PlanError(f"{name}: got {slowdown}, expected a finite number, {least.get(name, 0)} or more")
        for name in ("to_host_bytes_per_s", "from_host_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise PlanError(f"{name}: got {rate}, expected a finite number above 0")
        if self.loss_chunks < 1:
            raise PlanError(f"loss_chunks: got {self.loss_chunks}, expected 1 or more")
        try:
            expand_classes(self.class_names)
        except ValueError as problem:
            raise PlanError(f"class_names: {problem}") from None

    def __hash__(self) -> int:
        numbers = (self.budget_bytes, self.predicted_peak_bytes, self.loss_chunks)
        return hash((frozenset(self.units.items()), *numbers, self.note))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (dict(self.units), *(getattr(self, field.name) for field in fields(self)[1:-1]))

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self, columns: int = _COLUMNS) -> str:
        """Return the text of `print(plan)`, in lines of at most this many columns."""
        rows = unit_rows(self.units, expand_classes(self.class_names), self.loss_text)
        return "\n".join([*layout(rows, columns), *self.prediction_lines(columns)])

    @property
    def loss_text(self) -> str:
        """How the loss is changed; empty if it is not."""
        return _chunks(self.loss_chunks) if self.loss_chunks > 1 else ""

    def prediction_lines(self, columns: int = _COLUMNS) -> list[str]:
        """Return budget, predictions and note, in lines of at most this many columns."""
        sizes, times = [], []
        if self.predicted_peak_bytes is not None:
            sizes.append(f"predicted peak {_bytes(self.predicted_peak_bytes)}")
        if self.budget_bytes is not None:
            sizes.append(f"budget {_bytes(self.budget_bytes)}")
        if self.predicted_slowdown is not None:
            waits = f" ({_percent(self.host_wait_slowdown)} waiting for copies)" if self.host_wait_slowdown else ""
            times.append(f"predicted slowdown {_percent(self.predicted_slowdown)}{self.range_text}{waits}")
        if self.bound_slowdown is not None:
            times.append(f"no plan can be below {_percent(self.bound_slowdown)} by the profile's times")
        elif self.predicted_slowdown and self.is_compiled:
            times.append("no bound is known for compiled units")
        hosts = []
        if self.predicted_host_bytes is not None:
            hosts.append(f"predicted host memory {_bytes(self.predicted_host_bytes)}")
        if self.host_budget_bytes is not None:
            hosts.append(f"host budget {_bytes(self.host_budget_bytes)}")
        lines = []
        for parts in (sizes, hosts, times):
            line = ", ".join(parts)
            lines += [line] if len(line) <= columns else parts
        return [part for line in (*lines, self.note) for part in wrap(line, columns, hang="    ")]

    @property
    def slowdown_range(self) -> tuple[float, float] | None:
        """The range of slowdowns that contains nine out of ten measured ones; None if unknown."""
        if not self.predicted_slowdown or self.slowdown_error is None:
            return None
        return max(0.0, self.predicted_slowdown - self.slowdown_error), self.predicted_slowdown + self.slowdown_error

    @property
    def range_text(self) -> str:
        """That range in percent, to print after the slowdown."""
        if self.slowdown_range is None:
            return ""
        low, high = self.slowdown_range
        return f" ({100 * low:.1f} to {100 * high:.1f})"

    def with_engine(self, engine: EngineChoice | str) -> Plan:
        """Return the plan with a different engine for each unit on the tape or from a trace that can run on it.

        Only the tape drops outputs, offloads, and holds values as parts. A unit that reads a dropped output runs on the tape,
        too, which shows when it is called.

        Args:
            engine: "tape" or "graph", which carry out the same plan.

        Returns:
            A plan that keeps and recomputes the same values.

        Raises:
            PlanError: it is a different engine, which keeps different values.

        Example:
            >>> plan = Plan({"layers.0": UnitPlan({"mlp.act.silu": "recompute"})})
            >>> str(plan.with_engine("graph").units["layers.0"].engine)
            'graph'
        """
        if engine not in _SAME_PLAN:
            raise PlanError(f"engine: got {engine!r}, expected {' or '.join(repr(str(one)) for one in _SAME_PLAN)}")
        units = {
            path: replace(unit, engine=EngineChoice(engine))
            if unit.engine in _SAME_PLAN and unit.keeps_whole and not unit.trips
            else unit
            for path, unit in self.units.items()
        }
        return replace(self, units=units)

    @property
    def is_compiled(self) -> bool:
        """Whether any unit runs inside `torch.compile`."""
        return any(unit.engine is EngineChoice.COMPILE for unit in self.units.values())

    @cached_property
    def drops_outputs(self) -> bool:
        """Whether any unit's output is dropped, which the units that read it recompute."""
        return any(unit.output is Action.RECOMPUTE for unit in self.units.values())

    @property
    def offloads(self) -> bool:
        """Whether any value is copied to host memory."""
        return any(unit.trips for unit in self.units.values())

    def diff(self, other: Plan) -> str:
        """Describe the changes from this plan to `other`, as text."""
        classes = expand_classes(other.class_names or self.class_names)
        lines = changed_units(self.units, other.units, classes, columns=_COLUMNS)
        for what, before, after in (
            ("budget", _bytes(self.budget_bytes), _bytes(other.budget_bytes)),
            ("predicted peak", _bytes(self.predicted_peak_bytes), _bytes(other.predicted_peak_bytes)),
            ("predicted host memory", _bytes(self.predicted_host_bytes), _bytes(other.predicted_host_bytes)),
            ("predicted slowdown", _percent(self.predicted_slowdown), _percent(other.predicted_slowdown)),
            ("loss", _chunks(self.loss_chunks), _chunks(other.loss_chunks)),
        ):
            if before != after:
                lines.append(f"{what} {before} -> {after}")
        return "\n".join(lines) or "no difference"

    def to_json(self) -> str:
        """Return the plan as JSON; units with equal plans are written once, with ranges of paths."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self)[1:-1]}
        numbers = {
            name: number
            for name, number in numbers.items()
            if number is not None or not ("host" in name or "error" in name)
        }
        version = _VERSION if self.offloads else 1
        names = {"class_names": dict(class_names)} if (class_names := numbers.pop("class_names")) else {}
        document = {"format": _FORMAT, "version": version, **numbers, "units": _encode_units(self.units), **names}
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from JSON.

        Raises:
            PlanFormatError: the text is not JSON, not a plan or of a later version, or it has an unknown action or key,
                a wrong type or a duplicate unit; the message says where.
        """
        root = read_document(text, format=_FORMAT, version=_VERSION, error=PlanFormatError)
        return root.record(cls, units=_decode_units(root.get("units")))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Raises:
            PlanError: no file can be written there; the message says why.
        """
        with writing(path, PlanError):
            Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file written by `save` or edited by hand.

        Raises:
            PlanFormatError: as for `from_json`, or a folder, or an empty file; the message names the file.
            MissingFileError: there is no such file.
        """
        data = read_file(
            path,
            expected="a plan that Plan.save or `recollect plan --out` wrote",
            advice="Make one: recollect.plan(profile, budget).save(path).",
            error=PlanFormatError,
        )
        try:
            return cls.from_json(data.decode())
        except UnicodeDecodeError as error:
            raise PlanFormatError(f"{path}: not a plan: {error}") from None
        except PlanFormatError as error:
            raise PlanFormatError(f"{path}: {error}") from None

    def with_note(self, note: str) -> Plan:
        """Return the same plan with a different note."""
        return replace(self, note=note)


def _chunks(number: int) -> str:
    return "in one piece" if number == 1 else f"in {number} chunks"


def _bytes(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100 * fraction:.1f} %"


def _encode_units(units: Mapping[str, UnitPlan]) -> list[dict[str, Any]]:
    paths_of: dict[UnitPlan, list[str]] = {}
    for path, unit in units.items():
        paths_of.setdefault(unit, []).append(path)
    entries = []
    for unit, paths in paths_of.items():
        entry: dict[str, Any] = {"paths": compress_paths([path for path in paths if is_plain(path)])}
        # A module that is really called "0-22" must not be read back as 23 modules.
        if exact := [path for path in paths if not is_plain(path)]:
            entry["exact_paths"] = exact
        entry |= {"engine": unit.engine, "output": unit.output, "values": dict(unit.actions)}
        if unit.trips:
            entry["trips"] = {name: trip._asdict() for name, trip in unit.trips.items()}
        entries.append(entry)
    return entries


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Units with equal plans, in a file."""

    paths: tuple[str, ...]
    exact_paths: tuple[str, ...] = ()
    engine: EngineChoice = EngineChoice.TAPE
    output: Literal["keep", "recompute"] = "keep"
    values: Mapping[str, Action]
    trips: Mapping[str, Trip] = field(default_factory=dict)


def _decode_units(place: Field) -> dict[str, UnitPlan]:
    units: dict[str, UnitPlan] = {}
    for entry in place.array():
        found = entry.record(_Entry)
        unit = entry.checked(
            UnitPlan, actions=found.values, output=found.output, engine=found.engine, trips=found.trips
        )
        paths = [
            (pattern.where, path)
            for pattern in entry.get("paths").array()
            for path in pattern.checked(expand_paths, pattern=pattern.data)
        ]
        paths += [(f"{entry.where}.exact_paths", path) for path in found.exact_paths]
        for where, path in paths:
            if path in units:
                raise PlanFormatError(f"{where}: the unit {path!r} appears twice; remove one of them")
            units[path] = unit
    return units
