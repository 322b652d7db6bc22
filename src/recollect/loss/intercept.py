"""Make a model compute its loss in chunks, without editing it, and undo that.

This works for two kinds of models: those with an integer attribute `loss_chunks` that they follow themselves (recollect's own),
and Hugging Face's causal language models, whose head returns `DeferredLogits` during a forward with labels.
"""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from recollect.engine.placed_forward import PlacedForward
from recollect.errors import AlreadyAppliedError, ChunkedLossError
from recollect.loss.deferred import DeferredLogits, LossCall, refusal

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def loss_in_chunks(model: nn.Module, num_chunks: int, *, without_gradients: bool = False) -> Iterator[None]:
    """Within the block, make the model compute its loss in chunks.

    `without_gradients`: also under `no_grad`, where callers usually want the logits. See `loss_forwards`.
    """
    forwards = loss_forwards(model, num_chunks, without_gradients=without_gradients)
    for forward in forwards:
        forward.put()
    try:
        yield
    finally:
        for forward in reversed(forwards):
            forward.take_off()


def loss_forwards(model: nn.Module, num_chunks: int, *, without_gradients: bool = False) -> list[PlacedForward]:
    """Return the forwards to place on a model, after all others, to have it compute its loss in chunks; none for one chunk.

    The model or a module in it has an integer attribute `loss_chunks`, or has a head (`get_output_embeddings()`, a plain
    `nn.Linear`) and a `forward` with `labels`. Forwards without labels run as before; under `no_grad` they do, too, unless
    `without_gradients`.
    """
    if num_chunks == 1:
        return []
    if not isinstance(num_chunks, int) or num_chunks < 1:
        raise ChunkedLossError(f"loss_chunks: got {num_chunks!r}, expected a whole number, 1 or more.")
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, (_ChunksForward, _LossForward)):
            raise AlreadyAppliedError(
                f"cannot apply a plan: {type(module).__name__} computes its loss in chunks already, by a recollect plan. "
                f"Remove it first: {own.applied.removal}."
            )
    for module in model.modules():
        if type(vars(module).get("loss_chunks")) is int:
            return [_ChunksForward(module, num_chunks)]
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if isinstance(head, nn.Module) and "labels" in inspect.signature(module.forward).parameters:
            _check_head(head, type(module).__name__, num_chunks)
            loss = _LossForward(module, num_chunks, without_gradients=without_gradients)
            return [loss, _HeadForward(head, loss)]
    raise ChunkedLossError(
        f"cannot compute the loss of {type(model).__name__} in {num_chunks} chunks: found neither an integer attribute "
        "`loss_chunks` that the model follows, nor a Hugging Face language model (get_output_embeddings() and labels in "
        "forward). Use loss_chunks=1, or call recollect.chunked_cross_entropy in the model."
    )


class _ChunksForward(PlacedForward):
    def __init__(self, module: nn.Module, num_chunks: int) -> None:
        super().__init__(module)
        self.num_chunks = num_chunks

    def put(self) -> None:
        super().put()
        self.own_chunks = self.module.loss_chunks
        vars(self.module)["loss_chunks"] = self.num_chunks

    def take_off(self) -> None:
        vars(self.module)["loss_chunks"] = self.own_chunks
        super().take_off()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class _LossForward(PlacedForward):
    """The forward of a language model; with labels, it makes the head defer the logits."""

    def __init__(self, module: nn.Module, num_chunks: int, *, without_gradients: bool) -> None:
        super().__init__(module)
        self.num_chunks = num_chunks
        self.without_gradients = without_gradients
        self.running = threading.local()

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_needed = torch.is_grad_enabled() or self.without_gradients
        if not self.is_on or not is_needed or not self._has_labels(args, kwargs):
            return self.forward(*args, **kwargs)
        call = LossCall(type(self.module).__name__, self.num_chunks)
        self.running.call = call
        try:
            output = self.forward(*args, **kwargs)
        finally:
            self.running.call = None
        if not call.has_logits:
            raise refusal(call, "does not call its output embedding, get_output_embeddings()")
        if not call.has_loss:
            raise refusal(call, "does not give cross_entropy the logits, though there are labels")
        return _without_logits(output)

    def _has_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if "labels" in kwargs:
            return kwargs["labels"] is not None
        bound = self._signature.bind_partial(self.module, *args)
        return bound.arguments.get("labels") is not None


class _HeadForward(PlacedForward):
    def __init__(self, module: nn.Module, loss: _LossForward) -> None:
        super().__init__(module)
        self.loss = loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self.loss.running, "call", None)
        if call is None or not self.is_on:
            return self.forward(*args, **kwargs)
        head: Any = self.module
        _check_hooks(head, call.model_name, call.num_chunks)
        hidden = args[0] if args else kwargs["input"]
        return DeferredLogits.of_head(call, hidden, head.weight, head.bias)


def _check_head(head: nn.Module, name: str, num_chunks: int) -> None:
    what = ""
    forward: Any = head.forward
    while isinstance(forward, PlacedForward):
        forward = forward.forward  # of a plan
    if type(head).forward is not nn.Linear.forward:
        what = f"is a {type(head).__module__}.{type(head).__qualname__}, expected a plain torch.nn.Linear: an adapter on it, "
        what += "or a different kind of matrix, would be left out"
    elif getattr(forward, "__func__", None) is not nn.Linear.forward:
        what = "has its own `forward` on the instance (accelerate places one for offloading), which would not run"
    if what:
        raise ChunkedLossError(
            f"cannot compute the loss of {name} in {num_chunks} chunks: its head {what}. Use loss_chunks=1."
        )
    _check_hooks(head, name, num_chunks)


def _check_hooks(head: nn.Module, name: str, num_chunks: int) -> None:
    if any(getattr(head, hooks, None) for hooks in _HOOKS):
        raise ChunkedLossError(
            f"cannot compute the loss of {name} in {num_chunks} chunks: its head {type(head).__name__} has hooks, which would "
            "see no logits (FSDP2 gathers a head that is sharded on its own by hooks: shard it together with the root "
            "module). Remove the hooks, or use loss_chunks=1."
        )


def _without_logits(output: Any) -> Any:
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        found = [f.name for f in dataclasses.fields(output) if isinstance(getattr(output, f.name), DeferredLogits)]
        return dataclasses.replace(output, **dict.fromkeys(found)) if found else output
    if isinstance(output, Mapping):
        return {name: None if isinstance(item, DeferredLogits) else item for name, item in output.items()}
    if isinstance(output, tuple):
        items: list[Any] = [None if isinstance(item, DeferredLogits) else item for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    return output
