"""Run the step of most loops: pass the batch to the model, find the loss in its output, go backward."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, get_args

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from recollect._torch_fsdp import GatheredParameters, fully_sharded_modules
from recollect._torch_parallel import split_backward
from recollect._torch_private import DATA_DEPENDENT, fake_mode
from recollect.arguments import check_kind
from recollect.errors import NotYetError, RecollectError, RecordError
from recollect.recording.optimizers import Optimizers, beside_parameters, copied_weights, state_tensors
from recollect.recording.restored_state import (
    free_gradients,
    leaves_of,
    restored_attributes,
    restored_buffers,
    undisturbed,
)
from recollect.recording.step_recording import Gradients
from recollect.tensors import tensors_in

_MOST_SHOWN: Final = 8
LossFunction = Callable[[Any], torch.Tensor]


@dataclass(eq=False)
class Step:
    """A training step: that of the commonest loop on a batch, or the user's own. `record` describes its fields."""

    model: nn.Module
    batch: Any = None
    own: Callable[[], object] | None = None
    optimizer: Optimizers = None
    loss_fn: LossFunction | None = None
    holds_output: bool = True
    gradients: Gradients = "held"
    loss_chunks: int = 1
    split_backward: bool = False

    def __post_init__(self) -> None:
        self.batch = as_dict(self.batch)
        # What else backward adds gradients to, such as weights in the loss, with its own; None before the first one. Held
        # weakly: forward makes leaves of its own, as with Hugging Face's `enable_input_require_grads`.
        self._beside: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] | None = None

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.model, self.batch)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def check(self, call: str = "record(model, batch)") -> None:
        """Check that a step, and a model to run it, are given; `call` is the function's, for errors."""
        check_kind(call, "model", self.model, nn.Module, "torch.nn.Module")
        if (self.batch is None) == (self.own is None):
            given = "neither" if self.own is None else "both"
            raise RecordError(
                f"{self.name}: got {given} of batch and step, expected one: a batch, or a step that you run."
            )
        if self.gradients not in get_args(Gradients):
            raise RecordError(
                f"gradients: got {self.gradients!r}, expected {' or '.join(map(repr, get_args(Gradients)))}."
            )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise RecordError(
                f"loss_fn: got {self.loss_fn!r}, expected a function from the model's output to a scalar."
            )
        for path, parameter in self.model.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise RecordError(
                    f"cannot record {self.name}: its parameter {path!r} has no shape before the first forward. Run the model "
                    "once."
                )

    def prepare_gradients(self) -> None:
        """Make the gradients that exist before the first step: zeros if the loop adds to them, else none."""
        for parameter in self.model.parameters():
            is_there = self.gradients == "accumulated" and parameter.requires_grad
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype) if is_there else None
        if self.gradients == "accumulated":
            GatheredParameters(self.model).begin_gradients_apart()

    def run(self) -> object:
        """Run it; return the values that the loop still holds when the next one begins."""
        if self.own is not None:
            self.own()
            return None
        output, loss = self.forward()
        held = (output, loss) if self.holds_output else None
        del output
        if self.split_backward:
            split_backward(loss, [tensor for tensor in tensors_in(self.batch) if tensor.requires_grad], self.model)
        else:
            self.backward(loss)
        return held

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore everything after the block, as `restored_state.undisturbed` does, and what the loss has changed."""
        loss = self.loss_fn if isinstance(self.loss_fn, nn.Module) else nn.Module()
        try:
            with undisturbed(self.model), restored_attributes(loss), restored_buffers(loss):
                yield
        finally:
            for tensor, gradient in self._alive_beside():
                tensor.grad = gradient

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; gradients of tensors other than the model's parameters are set aside before the first one."""
        if self._beside is None:
            self._set_gradients_aside(loss)
        loss.backward()

    def _set_gradients_aside(self, loss: torch.Tensor) -> None:
        own = set(map(id, self.model.parameters()))
        # FSDP2 has others in place of its parameters.
        leaves = [] if fully_sharded_modules(self.model) else leaves_of(loss)
        self._beside = [(weakref.ref(leaf), leaf.grad) for leaf in leaves if id(leaf) not in own]
        self.free_gradients_beside()

    def free_gradients_beside(self) -> None:
        free_gradients(tensor for tensor, _ in self._alive_beside())

    def _alive_beside(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        for reference, gradient in self._beside or ():
            if (tensor := reference()) is not None:
                yield tensor, gradient

    def forward(self) -> tuple[Any, torch.Tensor]:
        output = self.output()
        return output, self.loss_in(output)

    def output(self) -> Any:
        advice = "A dict is passed as keywords, a tuple or list as positions, anything else as the only argument."
        with _told(f"{self.name} rejected the batch ({describe_batch(self.batch)})", advice):
            return call_model(self.model, self.batch)

    def loss_in(self, output: Any) -> torch.Tensor:
        advice = "If it needs targets, write loss_fn=lambda output: cross_entropy(output, targets)."
        with _told(f"loss_fn failed on the output of {self.name}, its only argument", advice):
            loss = find_loss(output, self.name) if self.loss_fn is None else self.loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, torch.Tensor)
            what = f"a tensor of shape {list(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
            advice = ": reduce it, such as by loss_fn=lambda output: output.mean()" if is_tensor else ""
            raise RecordError(f"the loss of {self.name} is {what}, expected a tensor with one element{advice}.")
        if not loss.requires_grad:
            raise RecordError(
                f"the loss of {self.name} does not require grad: no parameter that it depends on is trained, or forward ran "
                "under torch.no_grad(), as a reentrant checkpoint does whose inputs need none (pass use_reentrant=False). Set "
                "requires_grad on what you train."
            )
        return loss


@contextmanager
def _told(what: str, advice: str) -> Iterator[None]:
    """Say what an error is about that wrong arguments cause, unless it says so by itself."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        if isinstance(error, (torch.OutOfMemoryError, RecollectError, *DATA_DEPENDENT)):
            raise
        if fake_mode() is not None:
            advice += " Some code runs on real tensors only, such as to() of a module in its forward: see if fake=False works."
        raise RecordError(f"{what}: {type(error).__name__}: {error}. {advice}") from error


def as_dict(batch: Any) -> Any:
    """Return a mapping of a different type, such as Hugging Face's `BatchEncoding`, as a dict, in which tensors are found."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a dict as keywords, a tuple or list as positions, anything else as its only argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def find_loss(output: Any, name: str) -> Any:
    """Return the loss in a model's output: the output itself, its `loss` attribute, or its "loss" entry."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        # As in nanoGPT's `(logits, loss)`.
        items = output if isinstance(output, (tuple, list)) else ()
        scalars = [place for place, item in enumerate(items) if isinstance(item, torch.Tensor) and item.ndim == 0]
        given = f"loss_fn=lambda output: output[{scalars[0]}]" if len(scalars) == 1 else "loss_fn=lambda output: ..."
        raise RecordError(
            f"found no loss in the output of {name}, a {type(output).__name__}: expected `output.loss`, output['loss'] or a "
            f"scalar tensor. Put labels into the batch, or pass {given}"
        )
    return loss


def describe_batch(batch: Any) -> str:
    """Describe a batch: "tokens int64[4, 512], labels int64[4, 512]"."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{key} {describe_batch(item)}" for key, item in batch.items())
    if isinstance(batch, (tuple, list)):
        runs = [(text, sum(1 for _ in alike)) for text, alike in itertools.groupby(map(describe_batch, batch))]
        shown = [text if number == 1 else f"{text} ({number} times)" for text, number in runs[:_MOST_SHOWN]]
        return ", ".join([*shown, f"and {len(runs) - _MOST_SHOWN} more"] if len(runs) > _MOST_SHOWN else shown)
    return type(batch).__name__


def device_of(model: nn.Module, batch: Any) -> torch.device:
    """Return the device of the step: the CUDA device with parameters, or that of the first parameter, or of the batch."""
    name, parameters = type(model).__name__, list(model.parameters())
    for parameter in parameters:
        # Elsewhere, clocks would not wait for kernels, and workspaces would go unseen.
        if (kind := parameter.device.type) not in ("cpu", "cuda", "meta"):
            raise NotYetError(
                settings={name: f"on {kind}"},
                needs="a clock and a meter of bytes for this device",
                advice="Run on CUDA or the CPU, where budgets hold. A plan from there runs on any device "
                "(recollect.apply), with no promise about its bytes.",
            )
    found = sorted({str(p.device) for p in parameters if p.device.type == "cuda"})
    if isinstance(model, nn.DataParallel):
        found += [f"cuda:{index}" for index in model.device_ids if f"cuda:{index}" not in found]
    if len(found) > 1:
        raise NotYetError(
            settings={name: f"on {' and '.join(found)}"},
            needs="a budget and a clock for each device of one process",
            advice="Run one process for each device (torchrun, with DDP, FSDP2 or pipeline stages), or put the model on one.",
        )
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and parameter.device.type == "cpu" != mesh.device_type:
            raise NotYetError(
                settings={name: f"on {mesh.device_type}, with sharded parameters on the CPU (CPUOffloadPolicy)"},
                needs="to count what is copied to the device and back in each step",
                advice="Call fully_shard without offload_policy.",
            )
    if found:
        return torch.device(found[0])
    candidates = (*parameters, *tensors_in(batch))
    return next((t.device for t in candidates if t.device.type != "meta"), torch.device("cpu"))


def step_tensors(
    model: nn.Module, batch: Any, optimizers: Optimizers = None, *, parameters: Sequence[torch.Tensor] | None = None
) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that exist before and after a step, by kind; including any optimizer state.

    `parameters`: the model's own, while others stand in for them, as in a forward under FSDP2.
    """
    gathered = GatheredParameters(model)
    parameters = [*model.parameters(), *gathered.own_parts] if parameters is None else parameters
    # Of a parameter that ZeRO-3 has partitioned, the part that stays in this process.
    parts = [part for parameter in parameters if (part := getattr(parameter, "ds_tensor", None)) is not None]
    buffers = beside_parameters(parameters, "main_grad")
    return {
        "parameters": [*parameters, *parts],
        **({"gradient_buffers": buffers} if buffers else {}),
        "gradients": [*(p.grad for p in parameters if p.grad is not None), *gathered.gradients_apart],
        "buffers": list(model.buffers()),
        "batch": tensors_in(batch),
        "optimizer_state": state_tensors(optimizers),
        "master_weights": copied_weights(parameters, optimizers),
    }


def resident_tensors(model: nn.Module, batch: Any, optimizers: Optimizers = None) -> list[torch.Tensor]:
    return [tensor for group in step_tensors(model, batch, optimizers).values() for tensor in group]
