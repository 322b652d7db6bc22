"""A memory budget for the engine of `deepspeed.initialize`.

Every step of the engine is within the budget, under ZeRO stages 0 to 3, in one process or several, which run the same plan; it
ends where the engine ends it, with all its micro-batches. docs/trainers.md has what is refused, or not yet there.

The first step of the loop is recorded as the engine runs it, so recording leaves nothing in ZeRO's partitions.

Run with deepspeed 0.19.8, on its CPU accelerator.
"""

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from recollect.applying import applied_to, apply_policy
from recollect.attaching.attached import Attached
from recollect.attaching.held import OnLarger
from recollect.byte_format import format_bytes
from recollect.engine.policy import DropAll
from recollect.errors import AlreadyAppliedError, BudgetTooSmallError, ConfigError, NotYetError
from recollect.extras import needed
from recollect.integrations.deepspeed import checkpointing
from recollect.integrations.deepspeed.section import ActivationCheckpointing, BudgetSection, read_config
from recollect.integrations.trainers import check_version, say_nothing
from recollect.measuring.device_memory import memory_bytes
from recollect.quantities import check_budget
from recollect.ranks.group import group_of
from recollect.ranks.members import check_alike
from recollect.recording.find_units import find_units
from recollect.recording.model_step import device_of
from recollect.recording.optimizers import optimizers_in


def initialize(
    *args: Any,
    memory_budget: int | str | None = None,
    on_larger: OnLarger | None = None,
    units: Iterable[str] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize`, and keep every step of the engine within a memory budget; see `recollect.attach`.

    The first step of the loop is recorded as it runs, and planned in `engine.step()`; a line about the plan goes to DeepSpeed's
    log. Processes that record together agree on one plan. `engine.memory_budget` is the handle, with `plan`, `report()` and
    `remove()`.

    An engine that was made already, as Accelerate's `prepare` makes one, is passed as the model, and returned.

    Args:
        *args: as `deepspeed.initialize` takes them.
        memory_budget: bytes of the whole step in each process, as an int or text: "22GiB", "90% of the device", "60%" of what
            the first step needs without recompute. By default the setting under "recollect" in the configuration, as in
            `{"recollect": {"memory_budget": "22GiB"}}`, else 90% of the device.
        on_larger: what to do at a step that no plan was made for: "replan", "warn" or "raise".
        units: module paths of the layers to plan, where they are not found.
        **kwargs: as `deepspeed.initialize` takes them.

    Returns:
        The result of `deepspeed.initialize`: engine, optimizer, data loader and schedule.

    Raises:
        MissingPackageError: deepspeed is not installed.
        ConfigError: deepspeed is too old; a different setting asks for recompute, too; or there is no optimizer; or an engine
            is passed with arguments for a new one.
        NotYetError: pipelines, tensor parallelism, the hybrid engine, DeepCompile.
        AlreadyAppliedError: the model has a plan, or recomputes by itself.
        QuantityError: the budget is not an amount of bytes, or is a percentage of a device whose memory is unknown.
        BudgetTooSmallError: raised by the first `engine.step()` that ends a step, if no plan fits.

    Example: `engine, optimizer, _, _ = initialize(model=model, config=config, memory_budget="22GiB")`.
    """
    with needed("deepspeed", by="recollect.integrations.deepspeed.initialize"):
        deepspeed = importlib.import_module("deepspeed")
    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    model = given.get("model")
    made: tuple[Any, Any, Any, Any] | None = None
    if isinstance(model, deepspeed.DeepSpeedEngine):
        made, given = _of_engine(model, given), {"model": model.module, "config": model.config, "mpu": model.mpu}
    config = read_config(given)
    section = BudgetSection.of(config).with_arguments(memory_budget, on_larger, units)
    check_before(given.get("model"), config, section, mpu=given.get("mpu"))
    made = made or deepspeed.initialize(*args, **kwargs)
    made[0].memory_budget = AttachedEngine(made[0], section, deepspeed.utils.logger.warning)
    return made


def _of_engine(engine: Any, given: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return what `deepspeed.initialize` returned with an engine; raise if it would need other arguments than the engine."""
    if others := [name for name in given if name != "model"]:
        raise ConfigError(
            settings={"model": type(engine).__name__, **dict.fromkeys(others, "...")},
            reason="the engine was made already, with other arguments",
            advice="Pass the engine, and memory_budget, on_larger and units only.",
        )
    if isinstance(vars(engine).get("memory_budget"), AttachedEngine):
        engine.memory_budget.remove()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def check_before(model: Any, config: Mapping[str, Any], section: BudgetSection, *, mpu: Any = None) -> None:
    """Raise if an engine could not be kept within a budget, before it takes the model, whose parameters ZeRO-3 partitions."""
    deepspeed = importlib.import_module("deepspeed")
    reason = "its engine is older than any that recollect knows"
    check_version("deepspeed", deepspeed.__version__, "deepspeed 0.16", reason)
    if isinstance(model, nn.Module):
        _check_config(config, mpu)
        _check_model(deepspeed, model, section.units)
        device = torch.device(deepspeed.accelerator.get_accelerator().device_name())
        check_budget(section.budget, device_bytes=memory_bytes(device))


class AttachedEngine(Attached):
    """The handle of an engine: its steps end where the engine says that its optimizer has stepped.

    ZeRO steps over one part of the parameters after the other, and then gathers them: no optimizer's step ends it.
    """

    def __init__(self, engine: Any, section: BudgetSection, log: Any) -> None:
        optimizers = optimizers_in(engine.optimizer) if hasattr(engine.optimizer, "param_groups") else []
        if not optimizers:
            raise ConfigError(
                settings={"optimizer": None},
                reason="nothing ends a training step, and its state is part of what has to fit",
                advice='Pass optimizer=, or put "optimizer" into the configuration.',
            )
        model = engine.module
        self._engine = engine
        ranks = group_of(
            range(torch.distributed.get_world_size()), "integrations.deepspeed.initialize(model=model, ...)"
        )
        super().__init__(
            model,
            section.units,
            optimizers,
            section.budget,
            device=device_of(model, None),
            on_larger=section.on_larger,
            measure=section.measure,
            log=log if ranks.is_first else say_nothing,
            ends_by_hand=True,
            ranks=ranks,
        )
        check_alike(
            ranks,
            model,
            {"memory_budget": section.budget, "on_larger": section.on_larger, "units": self.unit_paths},
        )
        self._own_step = engine.step
        engine.step = self._step

    def remove(self) -> None:
        super().remove()
        vars(self._engine).pop("step", None)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine's own step; it ends a training step where gradients are no longer accumulated."""
        before = self._engine.global_steps
        result = self._own_step(*args, **kwargs)
        if self._engine.global_steps != before:
            try:
                self.end_step("engine")
            except BudgetTooSmallError as error:
                bucket = self._bucket_text()
                raise error.changed(
                    advice=(f"{bucket}: lower it.", *error.advice) if bucket else error.advice
                ) from None
        return result

    def report(self) -> str:
        """Return the text of `Attached.report`, and DeepSpeed's possible share of the bucket."""
        return "\n".join(filter(None, (super().report(), self._bucket_text())))

    def _bucket_text(self) -> str:
        """Return the size of a bucket, even for small models, and the setting that determines it; "" without ZeRO."""
        number = self._engine.zero_reduce_bucket_size() if self._engine.zero_optimization() else 0
        nbytes = number * max((p.element_size() for p in self.model.parameters()), default=0)
        setting = f"zero_optimization.reduce_bucket_size = {number:,}"
        return (
            f"DeepSpeed's bucket for gradients takes up to {format_bytes(nbytes)} of it ({setting})" if nbytes else ""
        )


def _check_config(config: Mapping[str, Any], mpu: Any) -> None:
    section = ActivationCheckpointing.of(config)
    for name in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        if section is not None and getattr(section, name):
            raise ConfigError(
                settings={f"activation_checkpointing.{name}": True},
                reason="it changes what deepspeed.checkpointing.checkpoint keeps, and the budget decides what is kept",
                advice="Drop it.",
            )
    parallel: dict[str, Any] = {"tensor_parallel.autotp_size": _at(config, "tensor_parallel", "autotp_size")}
    if mpu is not None:
        names = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
        sizes = [getattr(mpu, name)() for name in names if hasattr(mpu, name)]
        parallel["mpu"] = max(sizes, default=1)
    settings = {name: size for name, size in parallel.items() if (size or 1) > 1}
    if settings:
        raise NotYetError(
            settings=settings,
            needs="one plan for ranks that hold different parts of a layer",
            advice="Train with data parallelism and ZeRO only.",
        )
    for path in (("hybrid_engine", "enabled"), ("compile", "deepcompile")):
        if _at(config, *path):
            raise NotYetError(
                settings={".".join(path): True}, needs="an engine that replaces the model's forward", advice="Drop it."
            )


def _at(config: Mapping[str, Any], part: str, name: str) -> Any:
    inner = config.get(part)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _check_model(deepspeed: Any, model: nn.Module, units: Iterable[str] | None) -> None:
    kind = type(model).__name__
    if isinstance(model, deepspeed.PipelineModule):
        raise NotYetError(
            settings={"model": kind},
            needs="several micro-batches that are in flight in one stage of a pipeline",
            advice="Pass the model itself, and train with ZeRO; or, in fp32 without ZeRO, pass the engine of "
            "deepspeed.initialize to recollect.attach, and each stage has its own plan.",
        )
    for name, its in (("deepspeed", deepspeed.checkpointing), ("recollect.integrations.deepspeed", checkpointing)):
        if its.is_configured():
            raise ConfigError(
                settings={f"{name}.checkpointing.is_configured()": True},
                reason="what the model runs under its checkpoint would be recomputed, whatever the budget, and under a plan "
                "some of it again",
                advice=f"Drop the call of {name}.checkpointing.configure, and call the layers themselves.",
            )
    if placed := applied_to(model):
        raise AlreadyAppliedError(
            f"cannot keep {kind} within a memory budget: it has a plan already. Remove it first: {placed[0].removal}."
        )
    # Raises if the model recomputes by itself.
    apply_policy(model, [unit.path for unit in find_units(model, units)], DropAll()).remove()
