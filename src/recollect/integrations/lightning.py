"""A memory budget for Lightning's `Trainer`, of the package `lightning` or `pytorch_lightning`.

Each package has its own `Callback`, and takes no other. So `MemoryBudget` is made at its first use, from the
packages that are loaded by then; importing this file loads neither.

Run with lightning 2.4.0 and 2.6.6, and pytorch-lightning 2.6.6.
"""

import functools
import importlib
import importlib.util
import sys
from typing import Any, Final

from recollect.attaching.attached import Attached
from recollect.errors import NotYetError
from recollect.extras import needed
from recollect.integrations.trainers import BudgetCallback, check_version

__all__ = ["BudgetHooks", "MemoryBudget"]  # noqa: F822, the second is made when it is asked for

_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
_LEAST_VERSION: Final = "2.4"
# The module itself; wrapped by `DistributedDataParallel`; sharded by its own `configure_model`.
_STRATEGIES: Final = ("SingleDevice", "DDP", "ModelParallel")


class BudgetHooks(BudgetCallback):
    """The hooks of `MemoryBudget`, which keep every training step within a memory budget; see `recollect.attach`.

    The first step is recorded as `training_step` runs it, in its precision, and planned; the line about the plan goes to
    Lightning's log, and its numbers to the trainer's loggers. Models of Hugging Face in the module make no cache of keys and
    values meanwhile; see `recollect.integrations.transformers.enable_memory_budget`. At the end of training the model is as it
    was. Several processes (`strategy="ddp"`, or `ModelParallelStrategy` with FSDP2) run one plan.

    Args:
        budget: bytes of the whole step, as an int or text: "22GiB", "90% of the device", "60%" of what the first step needs
            without recompute.
        on_larger: what to do at a step that no plan was made for: "replan", "warn" or "raise".
        units: module paths of the layers to plan, if they are not found; from the LightningModule, as in "model.layers.0".
        host_budget, engine, measure: host memory, what layers may run on, and peaks on the CPU; see `recollect.attach`.

    Attributes:
        attached: the handle of the last training, with `plan` and `report()`; None before the first.

    Raises:
        ConfigError: when training begins, Lightning is too old.
        NotYetError: when training begins, its strategy for several devices is a different one; or the module optimizes by hand
            in `DistributedDataParallel`.
        RecordError: when training begins, one of its other processes has no `MemoryBudget`.

    Example: `Trainer(callbacks=[MemoryBudget("22GiB")]).fit(module, loader)`.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            package = _package_of(trainer)
            check_version(package.partition(".")[0], importlib.import_module(package).__version__, _LEAST_VERSION)
            _check_strategy(trainer, pl_module)
            self._presence.tell()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the module: its optimizers exist, and the sanity check is over."""
        self._logged = []
        log = importlib.import_module(f"{_package_of(trainer)}.utilities.rank_zero").rank_zero_info
        model = trainer.strategy.model
        # Lightning has all processes wait for each other after `setup`.
        self._presence.check(is_after_barrier=True)
        self.attached = self._attach(model, trainer.optimizers, pl_module, log, self.engine)
        if pl_module.automatic_optimization:
            # Here it runs only forward, and may call the layers one by one. Otherwise it also runs backward.
            pl_module.training_step = _TrainingStep(pl_module, self.attached)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Hand the numbers of a new plan, or of a higher measured peak, to the loggers."""
        if numbers := self._new_numbers():
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._remove()
        step = vars(pl_module).get("training_step")
        if isinstance(step, _TrainingStep):
            step.take_off()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the model as it was, also if training ends with an error."""
        self.on_train_end(trainer, pl_module)


class _TrainingStep:
    """Stands in for a module's `training_step`; copies and pickles as the plain method."""

    def __init__(self, pl_module: Any, attached: Attached) -> None:
        self._module = pl_module
        self._attached = attached
        self._own = vars(pl_module).get("training_step")
        self._run = pl_module.training_step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._attached.call(self._run, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "training_step")

    def take_off(self) -> None:
        del self._module.training_step
        if self._own is not None:
            self._module.training_step = self._own


def __getattr__(name: str) -> Any:
    if name != "MemoryBudget":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _budget_class(tuple(package for package in _PACKAGES if package in sys.modules))


@functools.cache
def _budget_class(loaded: tuple[str, ...]) -> type[BudgetHooks]:
    """Return the callback for the packages that are loaded, or for the first that can be loaded."""
    packages = loaded or [p for p in _PACKAGES if importlib.util.find_spec(p.partition(".")[0]) is not None][:1]
    with needed("lightning", by="recollect.integrations.lightning.MemoryBudget"):
        callbacks = [importlib.import_module(package).Callback for package in packages or _PACKAGES[:1]]
    return type("MemoryBudget", (BudgetHooks, *callbacks), {"__doc__": BudgetHooks.__doc__, "__module__": __name__})


def _package_of(trainer: Any) -> str:
    return next(p for p in _PACKAGES if p in sys.modules and isinstance(trainer, sys.modules[p].Trainer))


def _check_strategy(trainer: Any, pl_module: Any) -> None:
    name = type(trainer.strategy).__name__
    if not name.startswith(_STRATEGIES):
        raise NotYetError(
            settings={"strategy": name, "devices": trainer.world_size},
            needs="a strategy that splits the model in its own way",
            advice='Pass strategy="ddp", or ModelParallelStrategy and fully_shard in configure_model.',
        )
    if name.startswith("DDP") and not pl_module.automatic_optimization:
        raise NotYetError(
            settings={"strategy": name, "automatic_optimization": False},
            needs="a backward inside the forward of DistributedDataParallel",
            advice="Leave backward and the optimizer to Lightning; or pass ModelParallelStrategy.",
        )
