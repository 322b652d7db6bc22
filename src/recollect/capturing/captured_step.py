"""A training step as a CUDA graph: one for each kind of batch, in one memory pool."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn

from recollect.applying import applied_to, apply_own
from recollect.byte_format import format_bytes
from recollect.capturing.cuda_graphs import Graphs
from recollect.capturing.held import ModelState, StaticBatch, kind_of
from recollect.capturing.plan_for_pool import PoolPlan, plan_for_pool, sized
from recollect.engine.captured import told_of_capture
from recollect.engine.placed_forward import Applied, Handle
from recollect.errors import AlreadyAppliedError, ArgumentError, ConfigError
from recollect.planning.planners import Engine
from recollect.plans.plan import Plan
from recollect.recording.eager_masks import eager_masks
from recollect.recording.model_step import Step, as_dict, describe_batch
from recollect.recording.record import record
from recollect.recording.restored_state import free_gradients, undisturbed

# Steps under the plan before one is captured: the engines learn which modules to watch, and libraries choose kernels.
_NUM_WARM_UP: Final = 3


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured step.

    Attributes:
        gradients: of each parameter that has one; it writes them, or adds to them.
    """

    loss: torch.Tensor
    gradients: list[tuple[nn.Parameter, torch.Tensor]]
    replay: Callable[[], None]


@dataclass(eq=False)
class _Kind:
    """Batches of one kind.

    Attributes:
        batch: what the graph reads.
        applied: the plan.
        trained: for each parameter of the model, whether it gets a gradient.
        graph: None until it is captured, together with those of the other kinds.
        off: what puts the plan back on the model, if it is off.
    """

    planned: PoolPlan
    batch: StaticBatch
    applied: Applied
    trained: list[bool] = field(default_factory=list)
    graph: _Graph | None = None
    off: ExitStack = field(default_factory=ExitStack)


class CapturedStep(Handle):
    """Runs forward and backward of a training step as a CUDA graph; `recollect.capture` makes it, for a budget.

    Or for a plan, which has to keep what random ops make.
    """

    removal: Final = "step.remove(), where step = recollect.capture(...)"
    """How users remove it, in errors."""

    def __init__(
        self,
        step: Step,
        budget: int | str | Plan,
        *,
        graphs: Callable[[], Graphs],
        units: Iterable[str] | None = None,
        engine: Engine = "tape",
        most_graphs: int = 4,
        log: Callable[[str], object] = print,
    ) -> None:
        self._step = step
        self._budget = budget
        self._new_graphs = graphs
        self._units = None if units is None else list(units)
        self._engine = engine
        self._most_graphs = most_graphs
        self._log = log
        self._kinds: dict[Hashable, _Kind] = {}
        # The one whose plan is on the model.
        self._on: _Kind | None = None
        # What gradients are added to, beside the pool, for all graphs.
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._state = ModelState(step.model)
        self._add(self._name_of(step.batch), step.batch)
        step.batch = None

    @property
    def plan(self) -> Plan:
        """The plan for batches of the last kind that was new."""
        return self._last.plan

    @property
    def predicted_pool_bytes(self) -> int:
        """Predicted size of the memory pool of all graphs."""
        return self._last.pool_bytes

    @property
    def predicted_bytes(self) -> int:
        """Predicted size of the pool and of all that is beside it, which the budget is for."""
        return self._last.total_bytes

    @property
    def pool_bytes(self) -> int:
        """Size of the pool now, as the allocator says."""
        return self._graphs.pool_bytes()

    @property
    def _last(self) -> PoolPlan:
        return next(reversed(self._kinds.values())).planned

    @property
    def _adds(self) -> bool:
        return self._step.gradients == "accumulated"

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run forward and backward of a batch; return the loss, detached.

        Args:
            batch: of a kind that has been captured: the same structure, shapes and types. Its tensors are copied, from any
                device; pinned ones without waiting, so write to them only when the device has come so far. A batch of a new
                kind is recorded, planned and captured first.

        Raises:
            ArgumentError: the step was removed; or something in the batch is neither a tensor nor hashable.
            BudgetTooSmallError: no plan fits for a batch of a new kind.
            ConfigError: gradients of the last step are there; a tensor of the model has moved; or there are too many kinds.

        Example:
            >>> step = recollect.capture(model, batch, optimizer, budget="16GiB")  # doctest: +SKIP
            >>> loss = step(batch)  # doctest: +SKIP
        """
        if self.is_removed:
            raise ArgumentError("step(batch): it was removed, and its graphs are gone. Capture the step once more.")
        self._state.check()
        self._check_gradients()
        batch = as_dict(batch)
        name = self._name_of(batch)
        if name not in self._kinds:
            self._add(name, batch)
        kind = self._kinds[name]
        graph = kind.graph or self._captured(kind)
        for parameter, own in graph.gradients if self._adds else ():
            given = parameter.grad
            if given is not own:
                own.zero_() if given is None else own.copy_(given)
        kind.batch.fill(batch)
        graph.replay()
        for parameter, own in graph.gradients:
            parameter.grad = own
        return graph.loss.clone()

    def remove(self) -> None:
        """Free the graphs and their memory, except the last gradients; restore the model's own forward."""
        self.is_removed = True
        for kind in self._kinds.values():
            kind.off.close()
            kind.applied.remove()
            kind.graph = None
        self._sums.clear()

    def __repr__(self) -> str:
        if self.is_removed:
            return f"<removed step of {self._step.name}>"
        number = f"{len(self._kinds)} graph{'' if len(self._kinds) == 1 else 's'}"
        return f"<captured step of {self._step.name}: {number} in a pool of {format_bytes(self.predicted_pool_bytes)}>"

    def _name_of(self, batch: Any) -> Hashable:
        return kind_of(batch), self._state.switches

    def _check_gradients(self) -> None:
        if not self._adds and any(p.grad is not None for p in self._step.model.parameters()):
            raise ConfigError(
                settings={"gradients": self._step.gradients},
                reason="the last step's gradients are there, which this step would replace",
                advice="Call optimizer.zero_grad() before each step (set_to_none=True, the default); or capture with "
                'gradients="accumulated".',
            )

    def _add(self, name: Hashable, batch: Any) -> None:
        """Plan and capture the step of batches of a new kind."""
        if len(self._kinds) == self._most_graphs:
            raise ConfigError(
                settings={"most_graphs": self._most_graphs},
                reason=f"the batch ({describe_batch(batch)}) is of one more kind, and each kind has a graph of its own",
                advice="Pad batches to fewer shapes, drop the last one (drop_last=True), or pass a larger most_graphs=.",
            )
        # The graphs make room for steps outside of their pool, and are captured again.
        for other in self._kinds.values():
            other.graph = None
        self._graphs = self._new_graphs()
        self._switch_to(None)
        static = StaticBatch(batch, self._step.device)
        planned = self._plan(static)
        kind = _Kind(planned, static, apply_own(self._step.model, planned.plan))
        kind.applied.removal = self.removal
        try:
            kind.trained = self._warmed_up(static)
            self._kinds[name] = self._on = kind
            self._captured(kind)
        except BaseException:
            self._kinds.pop(name, None)
            self._on = None
            kind.applied.remove()
            raise
        self._log(
            f"recollect: captured {self._step.name} ({describe_batch(batch)}): {format_bytes(planned.total_bytes)} of "
            f"{format_bytes(planned.plan.budget_bytes or 0)} predicted; pool {format_bytes(planned.pool_bytes)} predicted, "
            f"{format_bytes(self.pool_bytes)} taken"
        )

    def _plan(self, static: StaticBatch) -> PoolPlan:
        step = self._step
        if placed := applied_to(step.model):
            raise AlreadyAppliedError(
                f"cannot capture a step of {step.name}: it has a plan or is attached already. Remove that first: "
                f"{placed[0].removal}."
            )
        # Where steps are captured: what libraries have for each stream is then counted.
        with self._graphs.running(), _as_captured(static.batch):
            profile = record(
                step.model,
                static.batch,
                optimizer=step.optimizer,
                loss_fn=step.loss_fn,
                units=self._units,
                holds_output=False,
                gradients=step.gradients,
                engine=self._engine,
                group="alone",
            )
        others = [kind.planned for kind in self._kinds.values()]
        if isinstance(self._budget, Plan):
            return sized(profile, self._budget, others)
        planned = plan_for_pool(profile, self._budget, engine=self._engine, others=others)
        # A percentage is of the first batch's step.
        self._budget = planned.plan.budget_bytes or self._budget
        return planned

    def _warmed_up(self, static: StaticBatch) -> list[bool]:
        """Run the step under its plan as it will be captured; return for each parameter whether it gets a gradient."""
        step = replace(self._step, batch=static.batch)
        with undisturbed(step.model, keeps_attributes=True):
            for _ in range(_NUM_WARM_UP):
                free_gradients(step.model.parameters())
                with self._graphs.running():
                    _run(step)
            trained = [parameter.grad is not None for parameter in step.model.parameters()]
            step.prepare_gradients()
            with self._graphs.rehearsing():
                _run(step)
        return trained

    def _captured(self, wanted: _Kind) -> _Graph:
        """Capture all graphs, in the order in which their pool was predicted; return that of one kind."""
        for kind in self._kinds.values():
            self._switch_to(kind)
            kind.graph = self._capture(kind)
        return cast(_Graph, wanted.graph)

    def _switch_to(self, kind: _Kind | None) -> None:
        if self._on is not None and self._on is not kind:
            self._on.off.enter_context(self._on.applied.suspended())
        if kind is not None:
            kind.off.close()
        self._on = kind

    def _capture(self, kind: _Kind) -> _Graph:
        parameters = list(self._step.model.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter, is_trained in zip(parameters, kind.trained, strict=True):
            parameter.grad = self._sum_of(parameter) if self._adds and is_trained else None
        try:
            loss, replay = self._graphs.capture(partial(_run, replace(self._step, batch=kind.batch.batch)))
            gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        return _Graph(loss, gradients, replay)

    def _sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        return self._sums[parameter]


@contextmanager
def _as_captured(batch: Any) -> Iterator[None]:
    """Within the block, a model does what it does while it is captured."""
    with told_of_capture(), eager_masks(batch, is_like_others=True):
        yield


def _run(step: Step) -> torch.Tensor:
    # Casts of weights from before the graph would never be renewed, and those in it would be used outside.
    torch.clear_autocast_cache()
    with _as_captured(step.batch):
        output, loss = step.forward()
        del output
        loss.backward()
    torch.clear_autocast_cache()
    return loss.detach()
