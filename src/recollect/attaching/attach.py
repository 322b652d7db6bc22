"""`attach`: one line in any training loop."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recollect.applying import applied_to
from recollect.arguments import check_kind
from recollect.attaching.attached import Attached
from recollect.attaching.held import OnLarger
from recollect.attaching.megatron_core import models_inside, replica_group
from recollect.attaching.placement import abandon_open_steps
from recollect.engine.self_check import check_steps_can_be_recorded
from recollect.errors import AlreadyAppliedError, NotYetError, RecollectError, RecordError
from recollect.fitting import DEFAULT_BUDGET
from recollect.measuring.device_memory import memory_bytes
from recollect.measuring.host_memory import check_host_budget
from recollect.planning.planners import Engine
from recollect.quantities import check_budget, parse_bytes
from recollect.ranks.group import Place
from recollect.ranks.members import GroupChoice, check_alike, ranks_of
from recollect.recording.engines import check_engine, check_host_engine
from recollect.recording.model_step import device_of
from recollect.recording.optimizers import check_optimizers, optimizers_in
from recollect.tracebacks import lets_go


@lets_go
def attach(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
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
    """Keep any training loop within a memory budget; nothing else in the loop changes.

    The first step, up to the optimizer's, is recorded while it runs: it is a training step like any other, with the same
    gradients bit for bit, but slower and as lean as possible. Then the plan is made and applied, and one line is logged.
    A later step that the plan was not made for (a larger batch, longer sequences, more micro-batches) is
    recorded, under the leanest plan foreseen for it, and planned; plans are kept by shape, and swapped. A step that
    does more at equal shapes (layers that are skipped by chance, a different head, a flag) runs at its leanest from there on.
    Five later steps under each plan are timed while they run; if recompute takes longer than predicted, the step is planned
    again, once.

    Args:
        model: the model that is trained; several as a list or dict, planned together; Megatron's as its `get_model` returns
            them. It is not edited; only the `forward` of its modules is wrapped.
        optimizer: whose step ends a training step; several as a list, and then each must have stepped. Wrappers are unwrapped.
        budget: bytes of the whole step, as an int or text: "22GiB", "80GB", "90% of the device" (CUDA), "60%" of what the
            first step needs without recompute when it is repeated. 1 byte asks for the
            least peak: the first step's error tells it.
        on_larger: what to do at a step that no plan was made for: "replan", "warn" (once, and continue with the current
            plan), or "raise".
        units: module paths of the layers to plan, if they are not found.
        host_budget: bytes of host memory that values may be copied to in forward and back in backward; see `fit`. A step that
            is recorded offloads nothing, nor does a step at its leanest.
        engine: "graph" and "auto" let layers run from traces, "compile" inside `torch.compile`; see `fit`. Steps are recorded
            without it, and layers are traced, or compiled and measured, at the end of such a step, once for each shape: up
            to ten compilations of each kind of layer.
        measure: whether to measure peaks on the CPU, too: of the first step under each plan, and of every hundredth, which then
            take longer. On CUDA, which counts by itself, every step is measured.
        log: takes the line; by default it goes to standard error, in the first process of a group.
        group: the processes that record together and run one plan: a process group or a device mesh; by default those that
            the model is spread over (by DistributedDataParallel, FSDP, tensor parallelism), of Megatron's models the ranks of
            a pipeline stage; "alone" for its own plan.

    Returns:
        A handle with `plan`, `report()` and `remove()`.

    Raises:
        ArgumentError: the model is not a module, or the group is not a process group.
        RecordError: the optimizer trains a different model, or has no hooks after its step; DeepSpeed's ZeRO has the model;
            in the first step, it never steps, or steps without a backward; or a process of the group fails, does not call,
            has a different model, or calls the model less often in a step; or this PyTorch lacks features that recording needs.
        ConfigError: two processes of the group have different budgets, units or `on_larger`; or host memory is too small; or
            Megatron's model would run in CUDA graphs, or its groups do not exist.
        NotYetError: the model is one of DeepSpeed's pipelines, with ZeRO or in 16 bits.
        QuantityError: the budget is not a number of bytes, is too small for any step, or is a percentage of a device whose
            memory size is unknown.
        AlreadyAppliedError: the model already recomputes.
        UnsupportedModelError, UnknownNameError: see `record`; the former also of Megatron-FSDP.
        BudgetTooSmallError: raised by the optimizer's first step if no plan fits it.
        LargerStepError: raised by forward if `on_larger` is "raise".

    Warns:
        BudgetWarning: a later step fits under no plan, or is larger and `on_larger` is "warn"; a step needed more than the
            budget while it was recorded, or may have, since it did unplanned work; too many steps differ for more to be
            recorded; a recorded step ran in eval mode; it recomputes by a different mechanism, too; the optimizer
            stepped without a call of the model; or only an optimizer that was not passed stepped.
        TorchVersionWarning: once in a process, with a PyTorch newer than the tested ones, or one that behaves differently.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> attached = recollect.attach(model, optimizer, budget="80%", log=lambda line: None)
        >>> for batch_size in (256, 384, 256):
        ...     model(torch.randn(batch_size, 32)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> attached.recorded_steps
        [0, 1]
    """
    _check_words(on_larger, log)
    model = models_inside(model)
    whole = model if isinstance(model, nn.Module) else _together(model)
    ranks = ranks_of(whole, replica_group(model) if group is None else group, "attach(model, optimizer, budget)")

    def begin() -> Attached:
        check_steps_can_be_recorded()
        optimizers = optimizers_in(optimizer)
        if not optimizers:
            raise RecordError("attach: got no optimizer, expected the one whose step ends a training step.")
        _check_zero(whole)
        check_optimizers(whole, optimizers)
        _check_hooks(optimizers)
        if placed := applied_to(whole):
            raise AlreadyAppliedError(
                f"cannot attach to {type(whole).__name__}: it has a plan or is attached already. Remove that first: "
                f"{placed[0].removal}."
            )
        device = device_of(whole, None)
        check_budget(budget, device_bytes=memory_bytes(device))
        check_host_budget(host_budget)
        check_engine(engine, whole, split_backward=False)
        check_host_engine(engine, host_budget)
        abandon_open_steps()
        return Attached(
            whole,
            units,
            optimizers,
            budget,
            device=device,
            on_larger=on_larger,
            host_bytes=parse_bytes(host_budget),
            engine=engine,
            measure=measure,
            log=log or (lambda line: print(line, file=sys.stderr) if ranks.is_first else None),
            ranks=ranks,
        )

    attached = ranks.together(begin, Place.START, undo=Attached.remove)
    try:
        alike = {"budget": budget, "host_budget": host_budget, "on_larger": on_larger, "units": attached.unit_paths}
        alike["engine"] = engine
        check_alike(ranks, whole, alike)
    except RecollectError:
        attached.remove()
        raise
    return attached


def _check_words(on_larger: object, log: object) -> None:
    if on_larger not in ("replan", "warn", "raise"):
        raise RecordError(f"on_larger: got {on_larger!r}, expected 'replan', 'warn' or 'raise'.")
    if log is not None and not callable(log):
        raise RecordError(f"log: got {log!r}, expected a function that takes the line, such as print.")


def _check_zero(model: nn.Module) -> None:
    # Marks that ZeRO leaves: the first of stage 3, the other of all, and of 16 bits.
    if any(hasattr(parameter, mark) for parameter in model.parameters() for mark in ("ds_id", "_hp_mapping")):
        if type(model).__name__ == "PipelineEngine":
            raise NotYetError(
                settings={"model": "PipelineEngine"},
                needs="an optimizer that steps over the parameters, not ZeRO's or that of 16 bits, which steps over copies",
                advice="Train the pipeline in fp32 without ZeRO.",
            )
        raise RecordError(
            f"attach: DeepSpeed's ZeRO steps over its own parts of the parameters of {type(model).__name__}, expected an "
            "optimizer that steps over the parameters. Make the engine with recollect.integrations.deepspeed.initialize(..., "
            "memory_budget=...), which keeps its steps within a budget; of an engine that is there, as from Accelerate's "
            "prepare, with model=engine."
        )


def _check_hooks(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        try:
            optimizer.register_step_post_hook(lambda *_: None).remove()
        except AttributeError:
            raise RecordError(
                f"optimizer: {type(optimizer).__name__} has no hooks after its step, since torch.optim.Optimizer.__init__ did "
                "not run for it. If it steps another one, pass that one: its step then ends a training step, and what "
                "the outer one holds counts as other tensors."
            ) from None


class _Models(nn.Module):
    """Several models that are planned together."""


def _together(models: Sequence[nn.Module] | Mapping[str, nn.Module]) -> nn.Module:
    if isinstance(models, str) or not isinstance(models, (Sequence, Mapping)):
        check_kind("attach(model, optimizer, budget)", "model", models, nn.Module, "torch.nn.Module")
    named = models.items() if isinstance(models, Mapping) else ((str(i), m) for i, m in enumerate(models))
    whole = _Models()
    for name, model in named:
        if not isinstance(model, nn.Module):
            raise RecordError(f"attach: model {name!r} is a {type(model).__name__}, expected a torch.nn.Module.")
        whole.add_module(name, model)
    return whole
