"""Watches one call of a custom autograd Function, to learn whether its forward can run again with the same results.

NOTE [ What runs again ]
A Function's forward can call kernels that PyTorch does not see, so it is taken as a whole: one op. It runs again only if

1. all its inputs are known: tensors, plain values, and objects that hold those. Not modules, closures, generators;
2. it writes only to tensors that it made, or by a collective to Megatron's buffers, which are filled before each use. Writes
   that are seen are checked at every call; unseen ones by a checksum of its arguments, at the first calls with the same
   constants;
3. it reads no other tensors, unless nothing has ever written to them (a table of constants);
4. none of its ops is one that the tape keeps because a second run may differ (rule 4), or that a second run disturbs: a
   choice, a copy between devices, a compiled region, statistics; and no module runs in it. A collective may run again
   where all ranks run one plan, if it has ended when it returns, and all ranks ask for it in the same order (`_REPLAYED`);
5. it does not switch gradients on.

Otherwise its results are kept.
"""

import sys
import types
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from recollect._torch_parallel import PROCESS_GROUPS, has_ended, is_megatrons_buffer, name_of_group
from recollect._torch_private import is_fake_tensor, is_traceable_wrapper_subclass, transforms_are_active
from recollect.engine.captured import not_warmed_up
from recollect.engine.content import checksums
from recollect.engine.draws import FunctionDraws, cuda_generators, draws_unknown
from recollect.engine.facts import OpFacts, OpMode, facts_of, results_of, varies_on_cuda
from recollect.engine.function_call import Autocast, FunctionArguments, FunctionCall, autocast_now
from recollect.engine.opcall import Settings
from recollect.engine.self_check import SwitchedOff, switched_off
from recollect.engine.together import Agreement, can_be_gathered, is_partitioned
from recollect.engine.values import Layout, is_known, layout_of
from recollect.tensors import has_strides, tensors_in, version_of
from recollect.weak_map import WeakMap

# On a storage: which call made it, or was given it.
_MARK = "_recollect_function"

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size, Enum)
_PLAIN_TOO = (torch.memory_format, type, range, slice, types.BuiltinFunctionType, *PROCESS_GROUPS)
# How many tensors and nested objects are inspected, and how deep; if there are more, the Function is kept.
_MOST_OBJECTS = 64

# Functions of these packages have state elsewhere, or run modules, or are PyTorch's own way to run something else.
_FOREIGN = frozenset({"torch", "transformer_engine", "deepspeed"})
_TRANSFORMER_ENGINE = "transformer_engine.pytorch.module"
# Where it holds the buffers in which products exchange data with other ranks; None if there are none.
_USERBUFFERS = (f"{_TRANSFORMER_ENGINE}.base", "_ub_communicators")
# Some only compute, and are most of a model's work.
_PRODUCTS = frozenset(
    {
        "deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3",
        f"{_TRANSFORMER_ENGINE}.linear._Linear",
        f"{_TRANSFORMER_ENGINE}.layernorm_linear._LayerNormLinear",
        "transformer_engine.pytorch.attention.rope.FusedRoPEFunc",
    }
)

# Not exchanges between experts: ranks that got no rows may ask for them in a different order.
_REPLAYED = frozenset({"c10d:_allgather_base_", "c10d:_reduce_scatter_base_", "c10d:allreduce_"})

# Functions whose arguments were compared before and after a call, by the constants of the call.
_checked = WeakMap[set[Any]]()
_MOST_CHECKS = 8
# Functions found to change arguments unseen: which of `seen_arguments`.
_unseen_writers = WeakMap[set[int]]()


def is_plain_value(argument: Any) -> bool:
    """Whether this is a value that holds no others and does not change."""
    return isinstance(argument, (*_PLAIN, *_PLAIN_TOO))


def may_run_again(function: Any) -> bool:
    is_product = f"{function.__module__}.{function.__name__}" in _PRODUCTS
    return is_product or function.__module__.partition(".")[0] not in _FOREIGN


class Made(NamedTuple):
    """A tensor that a call made: its position among the results, and which of the call's storages it is on."""

    slot: int
    tensor: torch.Tensor
    storage: int


class FunctionRun:
    """One call of a Function, from before it runs until its results are known.

    Attributes:
        kept_because: why it cannot run again; empty if it can.
        wrote_unseen: the arguments that it changes unseen; before it has run, those that are known.
        arguments: its arguments, until `release`.
        others: tensors that it reads but does not get as arguments: parameters, and tensors in objects.
        partitioned: parameters that each rank has a part of.
        saved: the tensors that autograd is to save, in order.
        groups: names of those whose ranks run its collectives.
    """

    def __init__(
        self, function: Any, args: tuple[Any, ...], *, replays_collectives: bool = False, is_captured: bool = False
    ) -> None:
        self.function = function
        self.groups: list[str] = []
        self._replays_collectives = replays_collectives
        self.args = args
        self.arguments = FunctionArguments(args)
        self.kept_because = ""
        self.wrote_unseen: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []
        self.partitioned: list[nn.Parameter] = []
        self.saved: list[torch.Tensor] = []
        self.made: list[Made] = []
        self.num_storages = 0
        self._num_outputs = 0
        self._objects: list[tuple[Any, list[int]]] = []
        self._made_mark, self._given_mark = object(), object()
        # By its collectives.
        self._filled: list[torch.UntypedStorage] = []
        self._given: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._check_key: Any = None
        self._before: list[int] | None = None
        self.autocast: Autocast = ()
        has_spare_module = function.__module__.startswith(_TRANSFORMER_ENGINE)
        for leaf in self.arguments.leaves:
            if isinstance(leaf, torch.Tensor):
                self._look_at_tensor(leaf)
            elif has_spare_module and isinstance(leaf, nn.Module):
                pass  # Before its version 2.15: asked for weights in 8 bits, and for nothing else.
            elif not is_plain_value(leaf):
                self._look_at_object(leaf)
        if not may_run_again(function):
            self.keep("its package has state elsewhere")
        elif has_spare_module and vars(sys.modules.get(_USERBUFFERS[0], sys)).get(_USERBUFFERS[1]) is not None:
            self.keep("it may communicate while it multiplies")
        self._given = [*self.arguments.tensors, *self.others, *self.partitioned]
        self.draws = FunctionDraws(function, cuda_generators(self._given), is_captured=is_captured)
        self._versions = [version_of(tensor) for tensor in self._given]
        if (positions := _unseen_writers.get(function)) is not None:
            self.keep("it writes to its arguments out of sight")
            self.wrote_unseen = [t for index, t in enumerate(self._plain_given()) if index in positions]
        if not self.kept_because:
            self._begin()
        self._before = self._checksums_if_new()

    def _begin(self) -> None:
        for tensor in self._given:
            vars(tensor.untyped_storage())[_MARK] = self._given_mark
        self.autocast = autocast_now({tensor.device.type for tensor in self._given})

    def keep(self, reason: str) -> None:
        self.kept_because = self.kept_because or reason

    # Before

    def _look_at_tensor(self, tensor: torch.Tensor) -> None:
        kind = type(tensor)
        if not has_strides(tensor) or is_traceable_wrapper_subclass(tensor):
            self.keep("an argument is not a plain tensor")
        elif is_partitioned(tensor):
            if not can_be_gathered(tensor):
                self.keep("the parts of a parameter are offloaded or quantized")
            self.partitioned.append(tensor)
        elif isinstance(tensor, nn.Parameter):
            self.others.append(tensor)
        elif not (is_fake_tensor(tensor) or (kind is torch.Tensor and not vars(tensor))):
            self.keep("an argument is a tensor with more to it")

    def _look_at_object(self, top: Any) -> None:
        pending = [top]
        while pending:
            thing = pending.pop()
            if isinstance(thing, torch.Tensor):
                is_plain = has_strides(thing) and not is_traceable_wrapper_subclass(thing)
                if not is_plain or is_known(thing.untyped_storage()):
                    self.keep("an argument holds a tensor that is not plain")
                else:
                    self.others.append(thing)
            elif isinstance(thing, (dict, list, tuple)):
                pending += thing.values() if isinstance(thing, dict) else thing
            elif isinstance(thing, types.FunctionType) and not thing.__closure__:
                pass
            elif not is_plain_value(thing):
                attributes = getattr(thing, "__dict__", None)
                if attributes is None or callable(thing) or isinstance(thing, (nn.Module, torch.Generator)):
                    self.keep(f"an argument is a {type(thing).__name__}")
                    return
                if any(thing is seen for seen, _ in self._objects):
                    continue
                self._objects.append((thing, _identities(thing)))
                pending += attributes.values()
            if len(self._objects) + len(self.others) > _MOST_OBJECTS:
                self.keep("an argument holds many objects")
                return

    def _checksums_if_new(self) -> list[int] | None:
        """Return checksums of the arguments, if the Function has not been seen with these constants."""
        if self.function in _unseen_writers or any(is_fake_tensor(tensor) for tensor in self._given):
            return None
        if transforms_are_active():
            return None
        constants = tuple(leaf for leaf in self.arguments.leaves if isinstance(leaf, (int, float, bool, str)))
        known = _checked.setdefault(self.function, set())
        if constants in known or len(known) >= _MOST_CHECKS:
            return None
        if self.draws.is_captured:
            raise not_warmed_up(f"autograd Function {self.function.__name__}")
        self._check_key = constants
        return checksums(self._plain_given())

    def _plain_given(self) -> list[torch.Tensor]:
        return [tensor for tensor in self._given if has_strides(tensor) and not is_traceable_wrapper_subclass(tensor)]

    # While it runs

    def before_op(self, func: Any, facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.keep("it switches gradients on")
        if not isinstance(func, torch._ops.OpOverload):
            self.keep("it runs compiled code")
        if self._replays_collectives and facts.name in _REPLAYED and has_ended(func, args, kwargs):
            self.groups.append(name_of_group(args, kwargs))
            targets = (t for t in facts.written_by(args, kwargs) if self._has_made(t) or is_megatrons_buffer(t))
            self._filled += [target.untyped_storage() for target in targets]
        elif facts.is_collective or facts.moves_storage or facts.updated_by(args):
            self.keep(f"it runs {facts.name}")
        if not all(self._has_made(t) or self._has_filled(t) for t in facts.written_by(args, kwargs)):
            self.keep("it writes to a tensor from outside")
        if self.kept_because:
            return
        # From what gloo has received into, when the call waits for its collective.
        is_receipt = facts.overwrites and self._has_filled(args[0])
        for tensor in tensors_in((args, kwargs)):
            self._read(tensor, is_receipt)
        if facts.is_random and (SwitchedOff.RANDOM_OPS in switched_off() or draws_unknown(facts, args, kwargs)):
            self.keep(f"it runs {facts.name} with an unknown generator")

    def after_op(self, facts: OpFacts, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        arguments = [tensor.untyped_storage() for tensor in tensors_in((args, kwargs)) if has_strides(tensor)]
        for tensor in tensors_in(output):
            if facts.keeps and not (tensor.is_floating_point() or tensor.is_complex()):
                self.keep(f"it runs {facts.name}")
            if varies_on_cuda(facts, tensor):
                self.keep(f"it runs {facts.name}, which need not give the same bits again")
            if facts.device_keyword and any(
                tensor.device != argument.device for argument in tensors_in((args, kwargs))
            ):
                self.keep("it copies between devices")
            if not has_strides(tensor):
                continue
            if not any(tensor.untyped_storage() is storage for storage in arguments):
                self._note_made(tensor)

    def after_view(self, facts: OpFacts, args: Any, output: Any) -> None:
        """Look at the result of an op that need not make a storage, but may (`to`, `reshape`)."""
        if isinstance(output, torch.Tensor) and has_strides(output) and args and isinstance(args[0], torch.Tensor):
            if facts.is_lift or not (has_strides(args[0]) and args[0].untyped_storage() is output.untyped_storage()):
                self._note_made(output)

    def _note_made(self, tensor: torch.Tensor) -> None:
        vars(tensor.untyped_storage())[_MARK] = self._made_mark

    def _read(self, tensor: torch.Tensor, is_receipt: bool) -> None:
        if not has_strides(tensor):
            self.keep("it reads a tensor that is not strided")
            return
        storage = tensor.untyped_storage()
        mark = vars(storage).get(_MARK)
        if mark is self._made_mark or mark is self._given_mark or self._has_filled(tensor):
            return
        if version_of(tensor) > 0 or is_known(storage):
            self.keep("it reads a tensor that is not an argument")
            return
        if not is_receipt:
            vars(storage)[_MARK] = self._given_mark
            self.others.append(tensor)

    def _has_made(self, tensor: torch.Tensor) -> bool:
        return has_strides(tensor) and vars(tensor.untyped_storage()).get(_MARK) is self._made_mark

    def _has_filled(self, tensor: torch.Tensor) -> bool:
        return has_strides(tensor) and any(tensor.untyped_storage() is storage for storage in self._filled)

    # Afterwards

    def end(self, output: Any, saved: list[torch.Tensor], has_written: bool) -> None:
        """Find its results, now that its output is known, and the tensors that autograd is to save."""
        self.saved = saved
        if not self.arguments.are_of(self.args):
            self.keep("it changed a list of arguments")
        if has_written or [version_of(tensor) for tensor in self._given] != self._versions:
            self.keep("it changed an argument")
        if any(_identities(thing) != identities for thing, identities in self._objects):
            self.keep("it changed an object")
        outputs = results_of(output)
        self._num_outputs = len(outputs)
        storages: list[torch.UntypedStorage] = []
        for slot, tensor in enumerate([*outputs, *saved]):
            if (
                isinstance(tensor, torch.Tensor)
                and not is_traceable_wrapper_subclass(tensor)
                and self._has_made(tensor)
            ):
                storage = tensor.untyped_storage()
                index = next((i for i, other in enumerate(storages) if other is storage), len(storages))
                if index == len(storages):
                    storages.append(storage)
                self.made.append(Made(slot, tensor, index))
        self.num_storages = len(storages)

    def compare_arguments(self) -> None:
        """Find out whether it has changed arguments unseen, if they are compared at all."""
        if self._before is None:
            return
        given, versions = self._plain_given(), dict(zip(map(id, self._given), self._versions, strict=True))
        positions = {
            index
            for index, (tensor, before, now) in enumerate(zip(given, self._before, checksums(given), strict=True))
            if now != before and version_of(tensor) == versions[id(tensor)]
        }
        if not positions:
            _checked.setdefault(self.function, set()).add(self._check_key)
            return
        _unseen_writers.setdefault(self.function, set()).update(positions)
        self.wrote_unseen = [given[index] for index in positions]
        self.keep("it writes to its arguments out of sight")

    def recipe(self, settings: Settings, agreement: Agreement | None) -> FunctionCall:
        """Return the call that recomputes everything, under the settings that it ran under."""
        layouts: list[Layout | None] = [None] * self.num_slots
        for made in self.made:
            layouts[made.slot] = layout_of(made.tensor)
        draws = self.draws if self.draws.state_bytes else None
        return FunctionCall(
            self.function, self.arguments, layouts, draws, self.autocast, settings, agreement, self.groups
        )

    @property
    def name(self) -> str:
        name: str = self.function.__name__.replace(".", "_").replace("#", "_")
        return f"c10d:{name}" if self.groups else name

    def is_saved(self, made: Made) -> bool:
        return made.slot >= self._num_outputs

    @property
    def num_slots(self) -> int:
        return self._num_outputs + len(self.saved)


class FunctionWatch(OpMode):
    """Shows a Function's ops to its `FunctionRun`, above the tape's own mode."""

    def __init__(self, run: FunctionRun) -> None:
        super().__init__()
        self.run = run

    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        facts = facts_of(func)
        if facts.is_view:
            output = func(*args, **kwargs)
            self.run.after_view(facts, args, output)
            return output
        self.run.before_op(func, facts, args, kwargs)
        output = func(*args, **kwargs)
        self.run.after_op(facts, args, kwargs, output)
        return output


def _identities(thing: Any) -> list[int]:
    return [id(value) for value in vars(thing).values()]
