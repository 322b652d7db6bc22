"""Code shared by the trainer integrations: their callback, and their changes to the trainer's model and library."""

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from packaging.version import Version
from torch import nn

from recollect.arguments import listed
from recollect.attaching.attach import attach
from recollect.attaching.attached import Attached
from recollect.attaching.held import OnLarger
from recollect.errors import ConfigError
from recollect.fitting import DEFAULT_BUDGET
from recollect.planning.planners import Engine
from recollect.ranks.members import Presence


@dataclass(eq=False)
class BudgetCallback:
    """The common base of `MemoryBudget` for all trainers; each documents its arguments."""

    budget: int | str = DEFAULT_BUDGET
    _: KW_ONLY
    on_larger: OnLarger = "replan"
    units: Iterable[str] | None = None
    host_budget: int | str = 0
    engine: Engine = "tape"
    measure: bool = False

    def __post_init__(self) -> None:
        self._check_library()
        self.units = listed(self.units)
        self.attached: Attached | None = None
        self._presence = Presence("MemoryBudget")
        self._logged: list[dict[str, float]] = []

    def _check_library(self) -> None:
        """Raise if the library is too old, where a callback knows it before its trainer."""

    def _new_numbers(self) -> dict[str, float]:
        """Return the numbers of a new plan, of a higher measured peak, or of timed steps, since the last call; else {}."""
        numbers = {} if self.attached is None else self.attached.numbers
        if numbers in self._logged:
            return {}
        self._logged.append(numbers)
        return numbers

    def _attach(
        self, wrapped: nn.Module, optimizer: Any, model: nn.Module, log: Callable[[str], object], engine: Engine
    ) -> Attached:
        """Attach to the module that a trainer calls, and switch the model's cache off."""
        attached = attach(
            wrapped,
            optimizer,
            self.budget,
            on_larger=self.on_larger,
            units=in_wrapper(self.units, wrapped, model),
            host_budget=self.host_budget,
            engine=engine,
            measure=self.measure,
            log=log,
        )
        attached.remove_too(CacheOff(model))
        return attached

    def _remove(self) -> None:
        if self.attached is not None:
            self.attached.remove()


def check_version(
    package: str,
    version: str,
    least: str,
    reason: str = "its Trainer is older than any that MemoryBudget was run with",
) -> None:
    """Raise if a library is older than `least`, which is as the error says it: "2.4" or "transformers 4.50"."""
    if Version(version) < Version(least.rpartition(" ")[2]):
        raise ConfigError(settings={package: version}, reason=reason, advice=f"Install {least} or later.")


def say_nothing(_line: str) -> None:
    """Stand in for a log in processes other than the first."""


class CacheOff:
    """Keeps a model from making a cache, until removed."""

    def __init__(self, model: nn.Module) -> None:
        # Models within models have separate configurations, or share one.
        found: dict[int, Any] = {id(c): c for c in (getattr(module, "config", None) for module in model.modules())}
        self._configs = [config for config in found.values() if getattr(config, "use_cache", None) is True]
        for config in self._configs:
            config.use_cache = False

    def remove(self) -> None:
        for config in self._configs:
            config.use_cache = True
        self._configs = []


def in_wrapper(paths: Iterable[str] | None, wrapped: nn.Module, model: nn.Module) -> list[str] | None:
    """Return paths of a model's modules as paths in its wrapper.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> in_wrapper(["0"], model, model), in_wrapper(["0"], nn.ModuleDict({"module": model}), model)
        (['0'], ['module.0'])
    """
    if paths is None or wrapped is model:
        return None if paths is None else list(paths)
    prefix = next(name for name, module in wrapped.named_modules() if module is model)
    return [f"{prefix}.{path}" if path else prefix for path in paths]


def calling_trainer() -> Any:
    """Return the trainer that is among the callers of this function, the innermost one; None if there is none."""
    # Not imported, since it needs accelerate; without it there is none.
    home = sys.modules.get("transformers.trainer")
    frame = sys._getframe(1) if home is not None else None
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, home.Trainer):  # type: ignore[union-attr]
            return found
        frame = frame.f_back
    return None


class RemovingTrain:
    """Stands in for a trainer's `train`, and undoes something if training raises; pickles as the plain method."""

    def __init__(self, trainer: Any, remove: Callable[[], None]) -> None:
        self._trainer = weakref.ref(trainer)
        self._until_it_trains: Any = trainer
        self._remove = remove

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self._trainer()
        self._until_it_trains = None
        try:
            return type(trainer).train(trainer, *args, **kwargs)
        except BaseException:
            self._remove()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._trainer(), "train")
