"""A memory budget for torchtitan: a policy for `activation_checkpoint` in the configuration of its trainer.

torchtitan applies such a policy to a model on the meta device, before it compiles blocks and shards parameters, and without
a batch. So the step is recorded on fake tensors, from the job's shapes; or the plan comes from a file.

FlexAttention and variable-length attention are recorded as PyTorch's fused attention, and kept by every plan. docs/trainers.md
has what is refused, and what needs a plan file.

Run with torchtitan 0.3.0, on the CPU.
"""

import dataclasses
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recollect.applying import apply
from recollect.byte_format import format_bytes
from recollect.errors import BudgetWarning, ConfigError, ConfigWarning, NotYetError
from recollect.extras import needed
from recollect.fitting import DEFAULT_BUDGET
from recollect.integrations.trainers import check_version
from recollect.planning.planners import plan as planned
from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.recording.record import record
from recollect.warning import warn_user

with needed("torchtitan", by="recollect.integrations.torchtitan"):
    import torchtitan
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import OptimizersContainer, default_adamw
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
    from torchtitan.tools.logging import logger

__all__ = ["MemoryBudget"]

_HIDDEN_ATTENTION: Final = ("FlexAttention", "VarlenAttention")


class MemoryBudget(ActivationCheckpointing):
    """Recomputes as little as keeps a training step of torchtitan within a memory budget.

    `apply(model)` records the step of the job on fake tensors, plans it, applies the plan, writes it to `dump_folder`, and
    logs one line. The plan survives `to_empty`, `init_weights` and `fully_shard`.

    Attributes:
        plan: the applied plan; None before.

    Raises:
        ConfigError: by `apply`, if torchtitan is too old, or the model does not say how long its sequences are.
        NotYetError: by `apply`, if parts of the model are on other ranks.
        BudgetTooSmallError, QuantityError, PlanFormatError, UnknownNameError: by `apply`; see `plan` and `apply` of recollect.

    Warns:
        BudgetWarning: a batch has more tokens than was planned for.
        ConfigWarning: a setting of `ActivationCheckpointing` that has no effect.

    Example: `config.activation_checkpoint = MemoryBudget.of_job(config, "70GiB")` in a function that returns a
    `Trainer.Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The budget and the shapes of the job's step; `MemoryBudget.of_job` takes these from the job.

        Attributes:
            memory_budget: bytes of the whole step as text: "70GiB", "90% of the device", "60%" of the step without recompute.
            local_batch_size, gradient_accumulation_steps: as in the job.
            seq_len: 0 is that of the rotary embedding, which torchtitan sets to the job's.
            loss, optimizer: as in the job.
            hardware: the hardware to model times for; see `recollect.record`. Empty: the local GPU, or else an H100.
            engine: "auto" is "compile" if the job compiles the model, with estimates for compiled blocks; else "tape".
            plan_file: apply this plan instead. The other settings are then only used to check batches.
        """

        memory_budget: str = DEFAULT_BUDGET
        local_batch_size: int = 8
        gradient_accumulation_steps: int = 1
        seq_len: int = 0
        loss: BaseLoss.Config = field(default_factory=CrossEntropyLoss.Config)
        optimizer: OptimizersContainer.Config = field(default_factory=default_adamw)
        hardware: str = ""
        engine: Literal["auto", "tape", "compile"] = "auto"
        plan_file: str = ""

    config: Config

    def __init__(self, config: Config, dump_folder: str = "") -> None:
        reason = "its activation_checkpoint is configured otherwise"
        check_version("torchtitan", torchtitan.__version__, "torchtitan 0.3", reason)
        super().__init__(config, dump_folder)
        self.plan: Plan | None = None
        self._has_warned = False
        for name in ("preserve_rng_state", "determinism_check", "debug"):
            default = ActivationCheckpointing.Config.__dataclass_fields__[name].default
            if getattr(config, name) != default:
                reason = "random numbers are always replayed, and nothing else can differ"
                warn_user(f"{name} has no effect under a plan: {reason}", ConfigWarning)

    @staticmethod
    def of_job(job: Any, memory_budget: str = DEFAULT_BUDGET, *, hardware: str = "", plan_file: str = "") -> Config:
        """Return the policy for a job, with the job's shapes, loss and optimizer.

        Flags on the command line that change these do not reach the policy: give them to it as well
        (`activation-checkpoint:config --activation-checkpoint.local-batch-size 4`). Without it a larger batch is warned about.
        tyro, which reads torchtitan's command line, warns that it does not know the policy's type; this is harmless.

        The job is a `Trainer.Config`; for the rest see `Config`.

        Raises:
            ConfigError: the job compiles the model with a backend other than Inductor.
            NotYetError: the job captures CUDA graphs; and without a plan file, it has tensor, pipeline, context or expert
                parallelism, or parameters that are cast for forward.

        Example: `config.activation_checkpoint = MemoryBudget.of_job(config, "70GiB")`.
        """
        _check_job(job, is_planned=not plan_file)
        training = job.training
        return MemoryBudget.Config(
            memory_budget=memory_budget,
            local_batch_size=training.local_batch_size,
            # The number of ranks that share a global batch is unknown yet; with an accumulated one, each step adds gradients.
            gradient_accumulation_steps=2 if training.global_batch_size > training.local_batch_size else 1,
            seq_len=training.seq_len,
            loss=job.loss,
            optimizer=job.optimizer,
            hardware=hardware,
            engine="compile" if _compiles_model(job.compile) else "auto",
            plan_file=plan_file,
        )

    def apply(self, model: nn.Module) -> None:
        """Plan the job's step and apply the plan, or apply the plan from the file."""
        started = time.perf_counter()
        config = self.config
        num_tokens = 0
        if config.plan_file:
            plan = Plan.load(config.plan_file)
        else:
            _check_whole(model)
            shape = (config.local_batch_size, config.seq_len or _seq_len(model))
            num_tokens = shape[0] * shape[1]
            plan = _planned(model, config, shape)
        apply(model, plan)
        self.plan = plan
        if num_tokens:
            model.register_forward_pre_hook(lambda _, args: self._check_batch(args, num_tokens))
            if self.dump_folder and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
                folder = Path(self.dump_folder)
                folder.mkdir(parents=True, exist_ok=True)
                plan.save(folder / "recollect_plan.json")
        logger.info(_line(plan, config, time.perf_counter() - started))

    def _check_batch(self, args: tuple[Any, ...], num_tokens: int) -> None:
        tokens = args[0] if args else None
        if self._has_warned or not isinstance(tokens, Tensor) or tokens.numel() <= num_tokens:
            return
        self._has_warned = True
        warn_user(
            f"torchtitan: got a batch of {' x '.join(map(str, tokens.shape))} tokens, planned for {num_tokens}: the step may "
            "exceed its memory budget. Set local_batch_size and seq_len of activation_checkpoint to the job's.",
            BudgetWarning,
        )


def _planned(model: nn.Module, config: MemoryBudget.Config, shape: tuple[int, int]) -> Plan:
    # Not `utils.device_type` of torchtitan, which takes the CPU for CUDA where PyTorch was built for it and finds no GPU.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in ("tokens", "positions", "labels")}
    loss_fn: Any = config.loss.build()
    optimizers: Any = config.optimizer.build(model_parts=[model])
    skips_head = isinstance(loss_fn, ChunkedLossWrapper)
    before: Any = vars(model).get("_skip_lm_head")
    if skips_head:
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True  # type: ignore[assignment]
    labels: list[Tensor] = []
    # They are an argument of the step, not of the model, and so part of the batch that counts.
    hook = model.register_forward_pre_hook(lambda *call: _take_labels(labels, *call), with_kwargs=True)
    try:
        with _attention_in_sight(model) as replaced:
            profile = record(
                model,
                batch,
                loss_fn=lambda output: loss_fn(output, labels.pop(), float(shape[0] * shape[1]))[0],
                optimizer=list(optimizers.optimizers),
                fake=True,
                hardware=config.hardware or None,
                engine=_engine(config),
                holds_output=False,
                gradients="accumulated" if config.gradient_accumulation_steps > 1 else "freed",
            )
    finally:
        hook.remove()
        if skips_head and before is None:
            del model._skip_lm_head
    return _without_names(planned(_keeping(profile, replaced), config.memory_budget), replaced)


def _take_labels(labels: list[Tensor], _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    labels.append(kwargs["labels"])
    return args, {name: value for name, value in kwargs.items() if name != "labels"}


@contextmanager
def _attention_in_sight(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Run attention that cannot be recorded on fake tensors as PyTorch's fused attention; yield its modules' paths.

    It takes the same queries, keys and values, and saves the same for backward: these, the output, and a number for each row.
    """
    library = sys.modules.get("torchtitan.models.common.attention")
    hidden = tuple(getattr(library, name) for name in _HIDDEN_ATTENTION) if library is not None else ()
    found = {path: module for path, module in model.named_modules() if isinstance(module, hidden)}
    for module in found.values():
        module.forward = _fused_attention
    try:
        yield tuple(found)
    finally:
        for module in found.values():
            del module.forward


def _fused_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> Tensor:
    if others.get("out_transform") is not None:
        raise NotYetError(
            settings={"out_transform": others["out_transform"]},
            needs="a record of attention that also returns its normalizers",
            advice="Plan a recorded step on a GPU, and pass the plan's file as plan_file.",
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, scale=scale, is_causal=True, enable_gqa=enable_gqa).transpose(1, 2)


def _keeping(profile: Profile, modules: tuple[str, ...]) -> Profile:
    """Return the profile with everything that some modules compute marked as never dropped."""
    if not modules:
        return profile
    inside: defaultdict[int, set[str]] = defaultdict(set)
    for call in profile.calls:
        inside[call.graph].update(_prefixes(call.path, modules))
    graphs = []
    for index, graph in enumerate(profile.graphs):
        parts = tuple(inside[index])
        hidden = {number for number, value in enumerate(graph.values) if value.name.startswith(parts)}
        values = (dataclasses.replace(v, must_keep=v.must_keep or n in hidden) for n, v in enumerate(graph.values))
        # Compiled code that computes it again is not what will run.
        held = hidden.intersection(number for variant in graph.variants for number in variant.kept)
        variants = (one for one in graph.variants if one.is_default or held.issubset(one.kept))
        graphs.append(dataclasses.replace(graph, values=tuple(values), variants=tuple(variants)))
    return dataclasses.replace(profile, graphs=tuple(graphs))


def _prefixes(path: str, modules: tuple[str, ...]) -> set[str]:
    """Return how the names of values begin that these modules compute inside a unit."""
    return {f"{module.removeprefix(f'{path}.')}." for module in modules if module.startswith(f"{path}.")}


def _without_names(plan: Plan, modules: tuple[str, ...]) -> Plan:
    """Return the plan without the names of values that other ops compute in compiled code, which keeps them."""
    units = {}
    for path, unit in plan.units.items():
        parts = tuple(_prefixes(path, modules))
        actions = {name: action for name, action in unit.actions.items() if not name.startswith(parts)}
        units[path] = dataclasses.replace(unit, actions=actions) if unit.engine is EngineChoice.COMPILE else unit
    return dataclasses.replace(plan, units=units)


def _seq_len(model: nn.Module) -> int:
    try:
        return int(model.config.max_seq_len)  # type: ignore[union-attr, arg-type]
    except (AttributeError, ValueError):
        raise ConfigError(
            settings={"seq_len": 0},
            reason=f"{type(model).__name__} has no config.max_seq_len that says how long sequences are",
            advice="Set seq_len to the job's.",
        ) from None


def _line(plan: Plan, config: MemoryBudget.Config, seconds: float) -> str:
    if config.plan_file:
        return f"recollect: applied the plan of {config.plan_file}"
    peak, budget = (format_bytes(nbytes or 0) for nbytes in (plan.predicted_peak_bytes, plan.budget_bytes))
    return f"recollect: {budget} budget, predicted peak {peak}, {plan.predicted_slowdown or 0:+.1%}, planned in {seconds:.1f} s"


def _check_job(job: Any, *, is_planned: bool) -> None:
    _compiles_model(job.compile)
    if not job.training.disable_cuda_graphs:
        raise NotYetError(
            settings={"training.disable_cuda_graphs": False},
            needs="a plan inside a captured forward and backward",
            advice="Set --training.disable_cuda_graphs.",
        )
    if not is_planned:
        return
    parallelism, training = job.parallelism, job.training
    names = [f"{kind}_parallel_degree" for kind in ("tensor", "pipeline", "context", "expert")]
    split = {f"parallelism.{name}": n for name in names if (n := getattr(parallelism, name, 1)) > 1}
    if split:
        raise NotYetError(
            settings=split, needs="a record of one rank's part of the model", advice="Pass a plan's file as plan_file."
        )
    if training.mixed_precision_param != training.dtype:
        raise NotYetError(
            settings={
                "training.mixed_precision_param": training.mixed_precision_param,
                "training.dtype": training.dtype,
            },
            needs="a record of parameters that are cast when they are gathered",
            advice="Set both to the same, or pass a plan's file as plan_file.",
        )


def _compiles_model(compile_config: CompileConfig) -> bool:
    if not compile_config.enable or "model" not in compile_config.components:
        return False
    if compile_config.backend != "inductor":
        raise ConfigError(
            settings={"compile.backend": compile_config.backend},
            reason="only Inductor takes a plan for what compiled blocks keep",
            advice="Set --compile.backend inductor, or leave 'model' out of --compile.components.",
        )
    return True


def _engine(config: MemoryBudget.Config) -> Literal["tape", "compile"]:
    """Return the engine of a policy that is being applied.

    torchtitan's functions that apply it get the flags of the command line, but give the policy only the model.
    """
    if config.engine != "auto":
        return config.engine
    around = (frame.f_locals.get("compile_config") for frame, _ in traceback.walk_stack(None))
    found = next((one for one in around if isinstance(one, CompileConfig)), CompileConfig())
    return "compile" if _compiles_model(found) else "tape"


def _check_whole(model: nn.Module) -> None:
    missing = [name for name in ("tok_embeddings", "lm_head") if getattr(model, name, None) is None]
    split = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    if missing or split is not None:
        raise NotYetError(
            settings={"model": f"{split} as a DTensor" if split else f"no {' and no '.join(missing)}"},
            needs="a record of one rank's part of the model",
            advice="Pass a plan's file as plan_file.",
        )
