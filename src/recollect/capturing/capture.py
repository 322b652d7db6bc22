"""`capture`: a planned step as a CUDA graph, for your own loop."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn

from recollect.capturing.captured_step import CapturedStep
from recollect.capturing.cuda_graphs import CudaGraphs
from recollect.errors import ConfigError, NotYetError
from recollect.fitting import DEFAULT_BUDGET
from recollect.measuring.device_memory import memory_bytes
from recollect.planning.planners import Engine
from recollect.quantities import check_budget
from recollect.ranks.members import ranks_of
from recollect.recording.model_step import LossFunction, Step
from recollect.recording.optimizers import Optimizers, check_optimizers
from recollect.tracebacks import lets_go

_ENGINES: Final = ("tape", "graph", "auto")
_GRADIENTS: Final = ("freed", "accumulated")


@lets_go
def capture(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizers,
    budget: int | str = DEFAULT_BUDGET,
    *,
    loss_fn: LossFunction | None = None,
    gradients: Literal["freed", "accumulated"] = "freed",
    units: Iterable[str] | None = None,
    engine: Engine = "tape",
    most_graphs: int = 4,
    log: Callable[[str], object] | None = None,
) -> CapturedStep:
    """Plan a training step within a memory budget, and capture its forward and backward as a CUDA graph.

    A graph launches all kernels of the step at once, and Python runs between none of them. The budget counts the graph's own
    memory pool, which is predicted before anything is captured: a step that would not fit fails first. Recording and warm-up
    leave parameters, buffers, gradients and random generators as they were.

    A captured step repeats kernels only. What else the model does happens once, in the warm-up: Python numbers such as a
    dropout's probability are fixed, and hooks, counters and prints in forward do not run again.

    Args:
        model: on one CUDA device. Its parameters and buffers have to stay where they are: load weights by copying.
        batch: as for `recollect.fit`; later ones are copied into it.
        optimizer: one, or several; its state counts. Its step is yours.
        budget: bytes for parameters, gradients, the optimizer's state, the batch and the graphs' pool, as an int or text; a
            percentage is of what the step needs as a graph without recompute.
        loss_fn: from the model's output to a scalar; see `record`.
        gradients: "freed": the step makes new ones; call `optimizer.zero_grad()` before each. "accumulated": it adds to those
            that are there.
        units: module paths of the layers to plan, if they are not found.
        engine: what runs while the step is captured: "tape", "graph" or "auto"; see `recollect.plan`.
        most_graphs: batches of other shapes, and the model in a different mode, get graphs of their own, up to this many.
        log: takes a line for each graph; by default it goes to standard error.

    Returns:
        A function of a batch that runs forward and backward, and returns the loss. `remove()` frees its memory.

    Raises:
        ArgumentError: the model is not a module.
        BudgetTooSmallError: no plan fits; names the least budget.
        ConfigError: the model is not on a CUDA device; an op of the step waits for the device; a batch requires grad; or a
            value of a setting is unknown.
        NotYetError: the model is spread over several processes.
        AlreadyAppliedError, QuantityError, RecordError, UnsupportedModelError: see `recollect.fit`.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> from recollect.errors import ConfigError
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> batch, optimizer = torch.randn(256, 32), torch.optim.AdamW(model.parameters())
        >>> try:
        ...     step = recollect.capture(model, batch, optimizer, "70%", loss_fn=torch.sum)
        ... except ConfigError as error:
        ...     print(error.reason)
        CUDA graphs repeat kernels of a CUDA device
    """
    given = Step(model, batch, None, optimizer, loss_fn, holds_output=False, gradients=gradients)
    given.check("capture(model, batch, optimizer, budget)")
    check_optimizers(model, optimizer)
    for name, value, known in (("engine", engine, _ENGINES), ("gradients", gradients, _GRADIENTS)):
        if value not in known:
            raise ConfigError(
                settings={name: value},
                reason="a captured step does not have it",
                advice=f"Pass {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.",
            )
    if not (ranks := ranks_of(model, None, "capture(model, batch, optimizer, budget)")).is_alone:
        raise NotYetError(
            settings={"recollect.capture": given.name, "processes": len(ranks.ranks)},
            needs="graphs with collectives in them",
            advice="Use recollect.attach, which plans such models without a graph.",
        )
    if given.device.type != "cuda":
        raise ConfigError(
            settings={"recollect.capture": given.name, "device": str(given.device)},
            reason="CUDA graphs repeat kernels of a CUDA device",
            advice="Move the model there; or use recollect.fit or attach, which run on any device.",
        )
    check_budget(budget, device_bytes=memory_bytes(given.device))
    attributes = [value for module in model.modules() for value in vars(module).values()]
    generators = [value for value in attributes if isinstance(value, torch.Generator)]
    return CapturedStep(
        given,
        budget,
        graphs=partial(CudaGraphs, given.device, generators),
        units=units,
        engine=engine,
        most_graphs=most_graphs,
        log=log or partial(print, file=sys.stderr),
    )
