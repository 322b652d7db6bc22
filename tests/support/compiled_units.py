"""Units inside `torch.compile`: what is alive between forward and backward, by the names of the tape.

`without_code` cuts joint graphs as Inductor does and runs the halves op by op, since to compile code takes seconds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config

from recollect.engine.compiled.partitioner import PlanPartitioner
from recollect.engine.facts import OpMode, facts_of
from recollect.plans.value_names import result_names, value_stem
from recollect.tensors import tensors_in


def without_code(function: Callable[..., Any], partitioner: PlanPartitioner | None) -> Callable[..., Any]:
    """Compile a function as Inductor does with a partitioner, up to where it would generate code."""
    # Here: to import it warns of something deprecated.
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    def cut(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("compiler", None)
        fakes = detect_fake_mode(args[1])
        with inductor_config.patch(custom_partitioner_fn=partitioner), V.set_fake_mode(fakes):
            return compile_fx.partition_fn(*args, **kwargs)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        decompositions=select_decomp_table,
        partition_fn=cut,
    )
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True)
    return compiled


class _Named(OpMode):
    """Notes what each op computes, under the name that a plan has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes = [""]
        self.counts: Counter[tuple[str, str]] = Counter()
        self.values: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        facts = facts_of(func)
        if not (facts.is_view or facts.is_lazy or facts.changes_layout_only):
            key = (self.scopes[-1], facts.name)
            stem = value_stem(*key, self.counts[key])
            self.counts[key] += 1
            results = tensors_in(list(output) if isinstance(output, tuple) else [output])
            names = result_names(stem, 1 if facts.writes else facts.num_returns)
            self.values |= zip(
                names, (result.detach().clone() for result in results), strict=len(names) == len(results)
            )
        return output


def values_by_name(unit: nn.Module, *args: Any) -> dict[str, Tensor]:
    mode = _Named()
    hooks = []
    for path, module in unit.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: mode.scopes.append(path)))
        hooks.append(module.register_forward_hook(lambda *_: mode.scopes.pop() and None))
    with mode:
        unit(*args)
    for hook in hooks:
        hook.remove()
    return mode.values


def saved_tensors(output: Any, besides: Iterable[Tensor]) -> list[Tensor]:
    """Return what compiled code holds for backward, besides what is there anyway: parameters and inputs."""
    there = {tensor.untyped_storage().data_ptr() for tensor in besides}
    pending = [tensor.grad_fn for tensor in tensors_in(list(output) if isinstance(output, tuple) else [output])]
    node: Any = next(node for node in _nodes(pending) if type(node).__name__ == "CompiledFunctionBackward")
    held = [*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())]
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in held}
    return [tensor for address, tensor in found.items() if address not in there]


def _nodes(pending: list[Any]) -> Iterable[Any]:
    for node in pending:
        if node is not None:
            yield node
            pending += [following for following, _ in node.next_functions]


def names_of(saved: Iterable[Tensor], values: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors, by their content: in any order of elements, as compiled code lays out as it likes.

    Raises:
        LookupError: one has no name.
    """
    found = set()
    for tensor in saved:
        content = _content(tensor)
        names = [name for name, value in values.items() if _is_like(_content(value), content)]
        if not names:
            raise LookupError(f"saved, and no value of the unit: {tuple(tensor.shape)} {tensor.dtype}")
        found.add(names[-1])
    return found


def _content(tensor: Tensor) -> Tensor:
    """The whole memory that a tensor shows a part of, sorted."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0).double().sort().values


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
