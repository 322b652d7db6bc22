"""Stands in for CUDA graphs on a CPU: a captured step is a function that runs again, on the same tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from recollect._torch_private import rehearsing_capture


class RepeatedRuns:
    """Repeats a step by running it, as if captured, and writes its results where the first run left them.

    A graph's first run computes nothing, and neither does this one leave anything changed but where results are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        with rehearsing_capture():
            yield

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        parameters = list(self._model.parameters())
        sums = [parameter.grad for parameter in parameters]
        state = [tensor.clone() for tensor in (*self._model.buffers(), *(s for s in sums if s is not None))]
        generator = torch.get_rng_state()
        with rehearsing_capture():
            loss = step()
        made = [parameter.grad for parameter in parameters]
        for tensor, before in zip((*self._model.buffers(), *(s for s in sums if s is not None)), state, strict=True):
            tensor.copy_(before)
        torch.set_rng_state(generator)

        def replay() -> None:
            # A graph writes to memory, and to no attribute.
            before = [parameter.grad for parameter in parameters]
            for parameter, own in zip(parameters, sums, strict=True):
                parameter.grad = own
            with rehearsing_capture():
                loss.copy_(step())
            for parameter, own, given in zip(parameters, made, before, strict=True):
                if own is not None and own is not parameter.grad:
                    own.copy_(parameter.grad)
                parameter.grad = given

        return loss, replay

    def pool_bytes(self) -> int:
        return 0
