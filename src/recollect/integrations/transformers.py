"""A memory budget for Hugging Face's models in a loop of your own, and for its `Trainer` and those built on it, such as TRL's.

docs/trainers.md has what the callback does with each argument of the trainer, and what it refuses.

Run with transformers 4.50.3, 4.57.6, 5.0.0 and 5.23.0, accelerate 1.15.0, peft 0.21.2, trl 1.16.0 and
deepspeed 0.19.8.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from recollect._torch_parallel import is_data_parallel
from recollect.attaching.attach import attach
from recollect.attaching.attached import Attached
from recollect.attaching.held import OnLarger
from recollect.errors import ConfigError, NotYetError
from recollect.extras import needed
from recollect.fitting import DEFAULT_BUDGET
from recollect.integrations import trainers
from recollect.integrations.deepspeed.engine import AttachedEngine, check_before
from recollect.integrations.deepspeed.section import BudgetSection
from recollect.planning.planners import Engine
from recollect.ranks.members import GroupChoice

with needed("transformers", by="recollect.integrations.transformers"):
    import transformers
    from transformers import TrainerCallback
    from transformers.utils import logging

__all__ = ["MemoryBudget", "enable_memory_budget"]


def enable_memory_budget(
    model: nn.Module,
    optimizer: Any,
    budget: int | str = DEFAULT_BUDGET,
    *,
    on_larger: OnLarger = "replan",
    units: Iterable[str] | None = None,
    host_budget: int | str = 0,
    engine: Engine = "tape",
    measure: bool = False,
    log: Callable[[str], object] | None = None,
    group: GroupChoice = None,
) -> Attached:
    """Keep your own training loop of a Hugging Face model within a memory budget, in place of its checkpointing.

    Call it where `model.gradient_checkpointing_enable()` would be. It is `recollect.attach`, and switches `use_cache` off in
    the model's configuration until `remove()`, as gradient checkpointing does: in training the cache only holds the keys and
    values of every layer, until the model's output is gone. `generate` has its own setting, and still uses the cache.

    Args:
        model: the model, also in PEFT's.
        optimizer: the optimizer whose step ends a training step; several as a list.
        budget: bytes of the whole step, as an int or text; see `recollect.attach`.
        on_larger: what to do at a step that no plan was made for: "replan", "warn" or "raise".
        units: module paths of the layers to plan, where they are not found.
        host_budget: bytes of host memory that values may be copied to in forward and back in backward; see `recollect.attach`.
        engine: what layers may run on besides the tape; see `recollect.attach`.
        measure: whether to measure peaks on the CPU, too; see `recollect.attach`.
        log: takes the line about the plan; by default it goes to standard error.
        group: the processes that run one plan; see `recollect.attach`.

    Returns:
        A handle with `plan`, `report()` and `remove()`.

    Raises:
        ConfigError: transformers is too old.
        AlreadyAppliedError: the model recomputes already, by its own gradient checkpointing or by recollect.
        RecordError, QuantityError, NotYetError: see `recollect.attach`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train()
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> attached = enable_memory_budget(model, optimizer, "90%", log=lambda line: None)
        >>> tokens = torch.randint(0, 64, (2, 16))
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
        >>> optimizer.step()
        >>> attached.plan is None
        False
    """
    _check_version()
    attached = attach(
        model,
        optimizer,
        budget,
        on_larger=on_larger,
        units=units,
        host_budget=host_budget,
        engine=engine,
        measure=measure,
        log=log,
        group=group,
    )
    attached.remove_too(trainers.CacheOff(model))
    return attached


class MemoryBudget(trainers.BudgetCallback, TrainerCallback):
    """Keeps every training step of a `Trainer` within a memory budget; see `enable_memory_budget`.

    The first step is recorded and planned when training begins; the line about the plan goes to the trainer's log. Its numbers,
    and the measured peak, go to `state.log_history` and wherever the trainer reports to (TensorBoard, Weights & Biases). At the
    end of training the model is as it was.

    Args:
        budget: bytes of the whole step, as an int or text: "22GiB", "90% of the device", "60%" of what the first step needs
            without recompute.
        on_larger: what to do at a step that no plan was made for: "replan", "warn" or "raise".
        units: module paths of the layers to plan, where they are not found.
        host_budget, engine, measure: host memory, what layers may run on, and peaks on the CPU; see `recollect.attach`.

    Attributes:
        attached: the handle of the last training, with `plan` and `report()`; None before the first.

    Raises:
        ConfigError: transformers is too old; or, when the trainer is made, it recomputes or offloads by itself.
        NotYetError: when the trainer is made, it splits the model in a way that was not run, or has an optimizer that steps in
            backward.
        RecordError: when training begins, one of its other processes has no `MemoryBudget`.

    Example: `Trainer(model, args, train_dataset=texts, callbacks=[MemoryBudget("22GiB")]).train()`.
    """

    _trainer: weakref.ref[Any] | None = None

    def _check_library(self) -> None:
        _check_version()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse arguments that clash with a plan, before any data is read; restore the plain model if training fails."""
        _check_arguments(args)
        if args.deepspeed:
            # The trainer replaces "auto" in it by its arguments.
            check_before(model, args.hf_deepspeed_config.config, self._section(args))
        trainer = trainers.calling_trainer()
        if trainer is not None:
            _check_layout(trainer.accelerator)
            vars(trainer)["train"] = trainers.RemovingTrain(trainer, self._remove)
        self._presence.tell()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach to the model, which is prepared by now, as its optimizer is."""
        # Again, for a callback that was added to a trainer.
        _check_arguments(args)
        # A training that an error ended does not say so; `auto_find_batch_size` starts again after one.
        self._remove()
        self._logged = []
        trainer = trainers.calling_trainer()
        # Found here: looking into the frames of a training loop makes them hold its batch.
        self._trainer = None if trainer is None else weakref.ref(trainer)
        wrapped = _wrapped(trainer, args, model)
        # The level of a trainer's default messages.
        log = (
            logging.get_logger("transformers.trainer").warning if state.is_world_process_zero else trainers.say_nothing
        )
        # Replicating wrappers, and DeepSpeed, broadcast the first process's parameters.
        self._presence.check(is_after_barrier=bool(args.deepspeed) or is_data_parallel(wrapped))
        if args.deepspeed:
            self.attached = AttachedEngine(wrapped, self._section(args), log)
            self.attached.remove_too(trainers.CacheOff(model))
        else:
            engine = engine_of(args)
            self.attached = self._attach(wrapped, optimizer, model, log, self.engine if engine == "tape" else engine)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the numbers of a new plan, or of a higher measured peak, as the trainer logs its loss."""
        numbers = self._new_numbers()
        trainer: Any = None if self._trainer is None else self._trainer()
        if numbers and trainer is None:
            state.log_history.append({**numbers, "epoch": state.epoch, "step": state.global_step})
        elif numbers:
            is_due = control.should_log
            # Not a subclass's own `log`: TRL's adds the metrics that it has gathered for the next loss, and clears them.
            transformers.Trainer.log(trainer, dict(numbers))
            control.should_log = is_due

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove()
        self._trainer = None

    def _section(self, args: Any) -> BudgetSection:
        """Merge the callback's settings with DeepSpeed's configuration; the callback's defaults do not count."""
        if self.engine not in ("tape", "auto"):
            raise NotYetError(
                settings={"engine": self.engine},
                needs="layers that DeepSpeed's engine runs, and that are measured in a training loop",
                advice=f'Leave out engine="{self.engine}", or train without DeepSpeed.',
            )
        if self.host_budget:
            raise NotYetError(
                settings={"host_budget": self.host_budget},
                needs="values that leave the device in layers that DeepSpeed's engine runs",
                advice="Leave out host_budget, or train without DeepSpeed.",
            )
        budget = None if self.budget == DEFAULT_BUDGET else self.budget
        on_larger: OnLarger | None = None if self.on_larger == "replan" else self.on_larger
        section = BudgetSection.of(args.hf_deepspeed_config.config).with_arguments(budget, on_larger, self.units)
        return dataclasses.replace(section, measure=section.measure or self.measure)


def engine_of(args: Any) -> Engine:
    """Return the engine for a trainer's layers: compiled ones stay so, where compiled units can be planned."""
    is_planned = args.torch_compile and args.torch_compile_backend == "inductor"
    return "compile" if is_planned else "tape"


def _wrapped(trainer: Any, args: Any, model: Any) -> Any:
    """Return the object a trainer calls: the model, DeepSpeed's engine, or the wrapper for distributed training."""
    if not args.deepspeed and args.world_size == 1:
        return model
    if trainer is None:
        how = {"deepspeed": "..."} if args.deepspeed else {"world_size": args.world_size}
        raise NotYetError(
            settings=how,
            needs="a trainer other than Hugging Face's, whose model wrapper is unknown",
            advice="Leave MemoryBudget out, and pass the wrapped model to recollect.attach, or for DeepSpeed to "
            "recollect.integrations.deepspeed.initialize.",
        )
    return trainer.model_wrapped


def _check_version() -> None:
    trainers.check_version("transformers", transformers.__version__, "transformers 4.50")


def _check_arguments(args: Any) -> None:
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if getattr(args, name, False):
            raise ConfigError(
                settings={name: True},
                reason="the trainer would recompute every layer, whatever the budget, and a plan some of it again",
                advice="Drop it, and MemoryBudget decides what to recompute; where it is the default, as in TRL, "
                f"set {name}=False.",
            )
    if args.torch_compile and args.torch_compile_mode in ("reduce-overhead", "max-autotune"):
        raise ConfigError(
            settings={"torch_compile": True, "torch_compile_mode": args.torch_compile_mode},
            reason="it captures CUDA graphs, whose pool would hold what a plan keeps",
            advice="Leave out torch_compile_mode, and MemoryBudget plans the compiled layers; or leave out MemoryBudget.",
        )
    if getattr(args, "activation_offloading", False):
        raise ConfigError(
            settings={"activation_offloading": True},
            reason="the trainer would move to the host what the plan counts on the device",
            advice="Drop it, and MemoryBudget decides what to keep; with a host_budget, also what to move.",
        )
    if args.n_gpu > 1:
        raise NotYetError(
            settings={"n_gpu": args.n_gpu},
            needs="copies of the model that one process recreates in each step",
            advice=f"Start one process for each GPU: torchrun --nproc-per-node {args.n_gpu}.",
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in ("lomo", "adalomo") or optimizer.endswith("_layerwise"):
        raise NotYetError(
            settings={"optim": optimizer},
            needs="an optimizer that steps in backward, so none of its steps ends the training step",
            advice="Choose a different one.",
        )


def _check_layout(accelerator: Any) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "activation_checkpointing", False):
        raise ConfigError(
            settings={"fsdp_config.activation_checkpointing": True},
            reason="FSDP would recompute every layer, whatever the budget, and a plan some of it again",
            advice="Drop it, and MemoryBudget decides what to recompute.",
        )
    settings: dict[str, Any] = {}
    if plugin is not None and plugin.fsdp_version != 2:
        settings["fsdp_version"] = plugin.fsdp_version
    if type(getattr(plugin, "cpu_offload", None)).__name__ == "CPUOffloadPolicy":
        settings["fsdp_config.cpu_offload"] = True
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if getattr(parallelism, name, 1) > 1:
            settings[name] = getattr(parallelism, name)
    if settings:
        raise NotYetError(
            settings=settings,
            needs="a layout that was not run in the trainer",
            advice="Train with DDP, with FSDP2 (fsdp_version 2), or with DeepSpeed.",
        )
