"""What every dispatch mode of the library that may be active while the user's model trains has in common."""

from __future__ import annotations

from typing import Any

from recollect._torch_private import TorchDispatchMode, fake_mode, untraced


class OpMode(TorchDispatchMode):
    """A dispatch mode that leaves `torch.compile` alone: what is compiled runs compiled, and the mode itself is not traced.

    Example:
        >>> import torch
        >>> class Names(OpMode):
        ...     def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ...         print(func.__name__)
        ...         return func(*args, **(kwargs or {}))
        >>> one = torch.tensor(1.0)
        >>> with Names():
        ...     two = one + one
        add.Tensor
    """

    # Ops that run other ops (random ops of DTensors on CUDA, flex attention) come like any other; `facts_of` knows them.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fake_mode()

    def is_foreign(self) -> bool:
        """Whether what runs is no part of the step, but a trial on fake tensors, as DTensors make before an op's first run."""
        return fake_mode() is not self._fakes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            untraced(vars(cls)["__torch_dispatch__"])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled: the mode sees each as one opaque op."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Keep torch from wrapping `__torch_dispatch__` (1 us per op); `untraced` serves the same purpose.
        return False
