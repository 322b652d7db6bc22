"""Every error and warning that recollect raises deliberately.

    RecollectError (Exception)
      ArgumentError (TypeError)               an argument of the wrong type, such as one of two that were swapped
      MissingFileError (FileNotFoundError)    no file where a plan or a profile was expected
      MissingPackageError (ImportError)       an optional package that is not installed; says how to install it
      QuantityError (ValueError)              a text or number that is not an amount of bytes or seconds
      PlanError (ValueError)                  a plan that cannot be used
        PlanFormatError                       malformed JSON, or JSON of a later version
        UnknownNameError                      a unit or value that the model does not have
      ProfileFormatError (ValueError)         malformed JSON, or JSON of a later version
      ConfigError (ValueError)                invalid or clashing settings of other libraries
      NotYetError (NotImplementedError)       a valid setting for something not built yet
      BudgetTooSmallError (ValueError)        no plan fits
      HardwareError (ValueError)              an unknown or missing device, or a malformed file about one
      UnsupportedModelError (ValueError)      nothing to plan
      AlreadyAppliedError (RuntimeError)      the model, or a layer of it, is already wrapped
      RecordError (RuntimeError)              the recorded step did not run
      ScheduleError (ValueError)              a pipeline schedule that cannot run
      LargerStepError (RuntimeError)          a step larger than any that a plan was made for
      ChunkedLossError (RuntimeError)         the loss cannot be computed in chunks
      MeterError (RuntimeError)               memory cannot be measured here
      MutatedValueError (RuntimeError)        a value was changed in place before backward used it
      RecomputeMismatchError (RuntimeError)   an autograd Function made different tensors when it ran again
      FreedValueError (RuntimeError)          a value's memory was freed (FSDP resharding) before backward used it
      RandomDrawError (RuntimeError)          an op drew different random numbers the second time
      OffloadError (RuntimeError)             a value could not be copied to host memory, or back
      DataError (ValueError)                  training data missing, empty or malformed
      CheckpointError (RuntimeError)          training checkpoint missing, corrupt, or of a different run
      BenchError (ValueError)                 a setting, or a stored result, that a benchmark cannot use
      DiagnosisError (ValueError)             a file to diagnose that cannot be read, or not safely

    BudgetWarning (UserWarning)               a step that may exceed its budget
    ConfigWarning (UserWarning)               a setting without effect, or with an unexpected one
    PlanMismatchWarning (UserWarning)         a plan that does not fit the ops it meets
    ProfileMismatchWarning (UserWarning)      a plan from a profile of a different version or device
    TorchVersionWarning (UserWarning)         an untested PyTorch, or one in which a hook does not work

Errors with numbers or names keep them as attributes, from which their text is derived. All can be pickled, because
training programs send errors between processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recollect.byte_format import format_bytes, least_amount


def _used_by(unit: str, module: str, op: str) -> str:
    path = ".".join(part for part in (unit, module) if part) or "the model"
    return f"used by {op} in {path}" if op else f"saved for backward in {path}"


def _restore(cls: type[RecollectError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RecollectError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class RecollectError(Exception):
    """The base of all recollect errors."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which fails if the constructor takes keywords.
        return _restore, (type(self), self.args, self.__dict__)


class ArgumentError(RecollectError, TypeError):
    """An argument of the wrong type: swapped with a second one, a path, or a class."""


class QuantityError(RecollectError, ValueError):
    """A text or number that is not an amount of bytes or seconds.

    Attributes:
        value: the value given.
        reason: what is wrong with it, and what to write instead.
    """

    def __init__(self, value: object, reason: str) -> None:
        self.value = value
        self.reason = reason
        super().__init__(f"{value!r}: {reason}")


class PlanError(RecollectError, ValueError):
    """A plan that cannot be used."""


class MissingFileError(RecollectError, FileNotFoundError):
    """No file where one was expected."""


class MissingPackageError(RecollectError, ImportError):
    """A package that recollect needs only for this, and that is not installed."""


class PlanFormatError(PlanError):
    """A plan file that is malformed or was written by a later version."""


class UnknownNameError(PlanError):
    """A plan names a unit or a value that the model does not have.

    Attributes:
        kind: what kind of thing the name should be, such as "unit" or "value".
        name: the unknown name.
        where: the object that was searched, such as "the model" or "unit 'layers.0'".
        suggestions: up to three known names that look like it, the best first.
    """

    def __init__(
        self, *, kind: str, name: str, known: Iterable[str], where: str = "the model", reason: str = ""
    ) -> None:
        self.kind = kind
        self.name = name
        self.where = where
        names = [known_name for known_name in dict.fromkeys(known) if known_name]
        self.suggestions = tuple(difflib.get_close_matches(name, names, n=3, cutoff=0.6))
        if reason:
            advice = reason
        elif self.suggestions:
            advice = f"Did you mean {' or '.join(repr(other) for other in self.suggestions)}?"
        elif names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            advice = f"It has {len(names)}: {', '.join(map(repr, names[:3]))}{more}."
        else:
            advice = f"It has no {kind}s at all."
        super().__init__(f"{where} has no {kind} {name!r}. {advice}")


class ProfileFormatError(RecollectError, ValueError):
    """A profile file that is malformed or was written by a later version."""


def settings_text(settings: Mapping[str, object]) -> str:
    """Return settings as errors show them: "num_layers=2, fp8=None"."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


class ConfigError(RecollectError, ValueError):
    """Settings that clash with each other or with the model, or a setting with an invalid value.

    Attributes:
        rule: name of the broken rule in docs/megatron.md; empty if that table does not have it.
        settings: the settings concerned, with their values.
        reason: why they are invalid.
        advice: what to change.
    """

    def __init__(self, *, settings: Mapping[str, object], reason: str, advice: str, rule: str = "") -> None:
        self.rule = rule
        self.settings = dict(settings)
        self.reason = reason
        self.advice = advice
        name = f" [{rule}]" if rule else ""
        super().__init__(f"got {settings_text(settings)}: {reason}. {advice}{name}")


class NotYetError(RecollectError, NotImplementedError):
    """A valid setting that asks for something recollect cannot do yet.

    Attributes:
        settings: the settings concerned, with their values.
        needs: what recollect would need for them.
        advice: what to do until then.
    """

    def __init__(self, *, settings: Mapping[str, object], needs: str, advice: str) -> None:
        self.settings = dict(settings)
        self.needs = needs
        self.advice = advice
        super().__init__(f"got {settings_text(settings)}: not yet: {needs}. {advice}")


class BudgetTooSmallError(RecollectError, ValueError):
    """No plan keeps the step's peak within the budget.

    Attributes:
        budget_bytes: the given budget.
        least_peak_bytes: the least peak of all plans that the planner knows.
        unit: the unit whose forward or backward has that peak; empty for the model itself.
        advice: sentences on what would help, the most promising first.
        plain_peak_bytes: the peak without recompute, which percentages are of; 0 if unknown.
        tenants: the contents of that plan's peak, with amounts, the largest first; empty if unknown.
        least_budgets: the least budgets, as strings to pass instead: an amount, and a percentage if that peak is known.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        least_peak_bytes: int,
        unit: str,
        advice: Sequence[str] = (),
        plain_peak_bytes: int = 0,
        tenants: Sequence[str] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.least_peak_bytes = least_peak_bytes
        self.unit = unit
        self.advice = tuple(advice)
        self.plain_peak_bytes = plain_peak_bytes
        self.tenants = tuple(tenants)
        percentage = (f"{-(-100 * least_peak_bytes // plain_peak_bytes)}%",) if plain_peak_bytes else ()
        self.least_budgets = (least_amount(least_peak_bytes), *percentage)
        # A percentage whose sign was forgotten; as text it is refused before.
        meant = f" If you meant a percentage, write '{budget_bytes}%'." if 0 < budget_bytes <= 100 else ""
        remedy = f". {' '.join(advice)}" if advice else ", or use a smaller batch."
        filled = f"It is filled by {', '.join(tenants)}. " if tenants else ""
        needed_by = unit if " " in unit else f"unit {unit!r}" if unit else "the model"  # or "the optimizer step"
        super().__init__(
            f"{format_bytes(budget_bytes)} ({budget_bytes} bytes) is below the least possible peak "
            f"{format_bytes(least_peak_bytes)} ({least_peak_bytes} bytes), which {needed_by} needs. {filled}"
            f"Raise the budget to {' or '.join(map(repr, self.least_budgets))}{remedy}{meant}"
        )

    def changed(self, **changed: Any) -> BudgetTooSmallError:
        """Return the same error with different advice, or with percentages of a different peak without recompute, and so on."""
        names = ("budget_bytes", "least_peak_bytes", "unit", "advice", "plain_peak_bytes", "tenants")
        return BudgetTooSmallError(**{name: getattr(self, name) for name in names} | changed)


class HardwareError(RecollectError, ValueError):
    """A device that is missing or unknown to the cost model, or a malformed file about one."""


class UnsupportedModelError(RecollectError, ValueError):
    """A model with nothing to plan."""


class AlreadyAppliedError(RecollectError, RuntimeError):
    """The model, or a layer of it, already recomputes: by recollect, a checkpoint wrapper, or a flag of its library."""


class RecordError(RecollectError, RuntimeError):
    """The step to record did not run: the model rejected the batch, or the loss is not a scalar."""


class ScheduleError(RecollectError, ValueError):
    """A pipeline schedule that no pipeline can run, or that does not match its stages."""


class LargerStepError(RecollectError, RuntimeError):
    """A step is larger than any that a plan was made for, and replanning was ruled out."""


class ChunkedLossError(RecollectError, RuntimeError):
    """The loss cannot be computed in chunks: the head, or code between it and the loss, would give a different result."""


class MeterError(RecollectError, RuntimeError):
    """Memory cannot be measured here: a different measurement or profiler is running, or the device is unknown."""


class MutatedValueError(RecollectError, RuntimeError):
    """A value that backward needs was changed in place after forward used it, which would make gradients wrong.

    Attributes:
        unit: path of the unit whose forward used it.
        module: path of the module inside the unit; empty for the unit's own forward.
        op: the op that used it; empty if autograd saved the value itself.
        shape: shape of the tensor.
        changes: number of writes since then; 0 if nobody counts them: through `.data`, NumPy, or a tensor's address.
        writer: what wrote to it in forward without telling autograd; empty if backward found the change.
    """

    def __init__(
        self, *, unit: str, module: str, op: str, shape: tuple[int, ...], changes: int, writer: str = ""
    ) -> None:
        self.unit = unit
        self.module = module
        self.op = op
        self.shape = shape
        self.changes = changes
        self.writer = writer
        how_often = f"{changes} time{'' if changes == 1 else 's'}" if changes else "(through `.data` or NumPy)"
        when = f"in forward by {writer}, unknown to autograd," if writer else f"{how_often} before backward used it"
        advice = (
            "let PyTorch see the write (`mutates_args` of a custom op)" if writer else "run backward before the write"
        )
        super().__init__(
            f"a tensor of shape {list(shape)}, {'made or ' * bool(writer and op)}{_used_by(unit, module, op)}, "
            f"was changed in place {when}"
            f"{' though backward needs what it held' * bool(writer)}. Write to a copy of it, or {advice}."
        )


class RecomputeMismatchError(RecollectError, RuntimeError):
    """A custom autograd Function, run again for backward, made other tensors than in forward."""

    def __init__(self, *, function: str) -> None:
        self.function = function
        super().__init__(
            f"the autograd Function {function!r} made tensors of other shapes, strides or types when its forward ran again: "
            "it depends on more than its arguments. Keep what it computes: in the plan, set its values to 'keep'."
        )


class FreedValueError(RecollectError, RuntimeError):
    """The memory of a value that backward needs was freed after forward used it, and not restored.

    Attributes:
        unit: path of the unit whose forward used it.
        module: path of the module inside the unit; empty for the unit's own forward.
        op: the op that used it.
        shape: shape of the tensor.
    """

    def __init__(self, *, unit: str, module: str, op: str, shape: tuple[int, ...]) -> None:
        self.unit = unit
        self.module = module
        self.op = op
        self.shape = shape
        super().__init__(
            f"a tensor of shape {list(shape)}, {_used_by(unit, module, op)}, has no memory now: its storage was freed after "
            "forward, as FSDP does when it reshards, and not filled again before backward needed it. Keep the output of "
            "the unit after it (output: keep): each unit is then recomputed in its own backward; and leave out "
            "set_unshard_in_backward(False)."
        )


class RandomDrawError(RecollectError, RuntimeError):
    """An op that draws from a generator of the whole process could not be run again with the same numbers."""

    def __init__(self, *, op: str) -> None:
        self.op = op
        super().__init__(
            f"{op} drew different random numbers in backward than in forward, so its result cannot be recomputed: a different "
            "thread drew from the same generator while it ran. Let that thread use its own generator, or keep the "
            "op's results in the plan."
        )


class OffloadError(RecollectError, RuntimeError):
    """A value could not be copied to host memory, or back.

    Attributes:
        unit: path of the unit whose forward computed it.
        name: the value's name in that unit; empty if host memory as a whole was not available.
        direction: "to host memory" or "back".
        reason: what went wrong, in words.
    """

    def __init__(self, *, unit: str = "", name: str = "", direction: str = "to host memory", reason: str) -> None:
        self.unit, self.name, self.direction, self.reason = unit, name, direction, reason
        what = (
            f"value {name!r} of unit {unit or 'the model'!r} could not be copied {direction}"
            if name
            else "no host memory"
        )
        super().__init__(f"offload: {what}: {reason}. Make a plan without host_budget to train without it.")


class DataError(RecollectError, ValueError):
    """Training data that are missing, empty or malformed."""


class CheckpointError(RecollectError, RuntimeError):
    """A training checkpoint that is missing, corrupt, or of a different run; or any other damaged file of a run folder."""


class BenchError(RecollectError, ValueError):
    """A setting that cannot be read or measured, or a stored result that is not comparable with today's."""


class DiagnosisError(RecollectError, ValueError):
    """A file that `recollect.diagnose` cannot read: missing, binary, malformed, or a pickle with more than plain data."""


class BudgetWarning(UserWarning):
    """A step may need more than its budget, or do something unknown to recollect."""


class ConfigWarning(UserWarning):
    """A setting without effect, or with an unexpected one."""


class PlanMismatchWarning(UserWarning):
    """A plan does not match the ops it meets; values that it does not name are kept."""


class ProfileMismatchWarning(UserWarning):
    """A plan's profile was recorded with a different version of PyTorch, on a different device, or over a faster link."""


class TorchVersionWarning(UserWarning):
    """A PyTorch newer than the tested ones, or one in which a hook that recollect depends on does not work."""
