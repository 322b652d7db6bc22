"""Runs the forward of a custom autograd Function again, to restore its outputs and the tensors that it saved for backward.

The forward runs as a whole, not op by op: kernels that PyTorch does not see may write to results of ops.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch.autograd.function import FunctionCtx

from recollect._torch_functions import above_autograd, tree_flatten, tree_unflatten, watched_functions
from recollect._torch_private import tree_leaves
from recollect.engine.draws import FunctionDraws
from recollect.engine.facts import results_of
from recollect.engine.opcall import Settings, current_settings
from recollect.engine.together import Agreement, gathered_parameter, group_of, is_partitioned
from recollect.engine.values import Layout, layout_of
from recollect.errors import RecomputeMismatchError

Autocast = tuple[tuple[str, torch.dtype], ...]
"""The device types for which autocast was on in forward, and the dtypes it cast to."""

Whole: TypeAlias = Callable[[torch.nn.Parameter], torch.Tensor]
"""Gathers a parameter that this rank has a part of."""


def autocast_now(devices: Iterable[str]) -> Autocast:
    """Return where autocast is on, of these device types and the CPU."""
    kinds = dict.fromkeys(("cpu", *devices))
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


class FunctionArguments:
    """The arguments of a Function's call: tensors apart (`tensors`, each once), everything else unchanged; `leaves`: both.

    Parameters are not taken apart: forward may read attributes of theirs, and they outlive the call anyway. An argument that
    bundles others (a dataclass with slots, as Transformer Engine's linear layers get) is created again for each run.
    """

    __slots__ = ("_bundles", "_needs_grad", "_positions", "_spec", "leaves", "tensors")

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._bundles = {position: type(arg) for position, arg in enumerate(args) if _is_bundle(arg)}
        leaves, self._spec = tree_flatten(self._unbundled(args))
        positions: dict[int, list[int]] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
                positions.setdefault(id(leaf), []).append(position)
        self._positions = list(positions.values())
        self.tensors: list[torch.Tensor] = [leaves[position] for position, *_ in self._positions]
        self._needs_grad = [tensor.requires_grad for tensor in self.tensors]
        self.leaves = leaves

    def release(self) -> None:
        """Release the tensors, which a recipe must not hold."""
        for position in itertools.chain(*self._positions):
            self.leaves[position] = None
        self.tensors = []

    def are_of(self, args: tuple[Any, ...]) -> bool:
        """Whether `args`, from which these were taken, still hold the same."""
        return list(map(id, tree_leaves(self._unbundled(args)))) == list(map(id, self.leaves))

    def _unbundled(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self._bundles:
            return args
        unbundled = list(args)
        for position in self._bundles:
            bundle = args[position]
            unbundled[position] = {f.name: getattr(bundle, f.name, None) for f in fields(bundle)}
        return tuple(unbundled)

    @property
    def partitioned(self) -> list[torch.nn.Parameter]:
        return [leaf for leaf in self.leaves if is_partitioned(leaf)]

    def filled(self, tensors: Sequence[torch.Tensor], whole: Whole = gathered_parameter) -> tuple[Any, ...]:
        """Return the arguments with these tensors in place of the first ones, and whole parameters for parts."""
        leaves = [whole(leaf) if is_partitioned(leaf) else leaf for leaf in self.leaves]
        for positions, tensor, needs_grad in zip(self._positions, tensors, self._needs_grad, strict=False):
            # Forward may ask which of its arguments require grad; these tensors are new and do not say.
            new = tensor.detach().requires_grad_(needs_grad)
            for position in positions:
                leaves[position] = new
        args = list(tree_unflatten(leaves, self._spec))
        for position, kind in self._bundles.items():
            bundle = object.__new__(kind)
            for name, value in args[position].items():
                object.__setattr__(bundle, name, value)
            args[position] = bundle
        return tuple(args)


def _is_bundle(arg: Any) -> bool:
    """Whether an argument is a dataclass with slots, which holds nothing but its fields."""
    return is_dataclass(arg) and not hasattr(arg, "__dict__")


class _Context(FunctionCtx):
    """Stands for the `ctx` of a forward that runs again; holds the tensors that it saves (`to_save`)."""

    to_save: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()


@dataclass(slots=True, eq=False)
class FunctionCall:
    """The recipe for all results of one call of a Function.

    Its results are the outputs, in order, and then the saved tensors, in order.
    """

    function: Any
    arguments: FunctionArguments
    layouts: Sequence[Layout | None]
    """Of the results in forward; None for those that it does not make."""
    draws: FunctionDraws | None
    """The random numbers of the forward; None if it drew none."""
    autocast: Autocast
    settings: Settings
    agreement: Agreement | None = None
    """That of all ranks with parts of its parameters, or with its collectives, to run it again; None if there is none."""
    groups: Sequence[str] = ()
    """Names of those whose ranks run its collectives."""

    @property
    def state_bytes(self) -> int:
        return 0 if self.draws is None else self.draws.state_bytes

    def __call__(self, tensors: list[Any], may_overwrite_first: bool, whole: Whole = gathered_parameter) -> list[Any]:
        if self.agreement is not None:
            for group in (*self.groups, *filter(None, map(group_of, self.arguments.partitioned))):
                self.agreement.check(group, f"run {self.function.__name__} again in backward")
        args = self.arguments.filled(tensors, whole)
        context = _Context()
        context.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        function = self.function
        with self._as_in_forward():
            if function.setup_context is torch.autograd.Function.setup_context:
                output = function.forward(context, *args)
            else:
                output = function.forward(*args)
                function.setup_context(context, args, output)
        outputs = results_of(output)
        results = [*outputs, *(saved for saved in context.to_save if saved is not None)]
        self._check(results)
        return results

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(watched_functions(None))
            stack.enter_context(self.settings.applied(current_settings()))
            stack.enter_context(torch.no_grad())
            stack.enter_context(above_autograd())
            stack.enter_context(_autocast_to(self.autocast))
            if self.draws is not None:
                stack.enter_context(self.draws.second())
            yield

    def _check(self, results: list[Any]) -> None:
        """Raise if a result is not laid out as in forward: code that depends on more than its arguments."""
        for layout, result in zip_longest(self.layouts, results[: len(self.layouts)]):
            if layout is not None and not (isinstance(result, torch.Tensor) and layout_of(result) == layout):
                raise RecomputeMismatchError(function=self.function.__name__)


@contextmanager
def _autocast_to(types: Autocast) -> Iterator[None]:
    """Switch autocast on as it was, without its cache, whose contents would outlive the forward."""
    if not types:
        yield
        return
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind, _ in types]
    had_cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    for kind, dtype in types:
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        for kind, was_enabled, dtype in before:
            torch.set_autocast_enabled(kind, was_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(had_cache)
