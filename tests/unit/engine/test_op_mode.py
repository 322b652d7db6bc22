"""`torch.compile` beside the library's dispatch modes: compiled code runs compiled, and nothing of a mode is in its graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from recollect.engine.facts import OpMode

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Negates(OpMode):
    """Runs an op of its own before each op that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        torch.neg(args[0])
        return func(*args, **(kwargs or {}))


class Graphs:
    """A compiler that runs graphs as they are, and notes what is in them."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.targets += [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def function(x: Tensor) -> Tensor:
    y = x * x.sum().item()  # `item` breaks the graph, and runs with the compiler watching what it calls.
    return y + 1


def test_compiled_code_runs_compiled_under_a_mode() -> None:
    graphs, x = Graphs(), torch.arange(3.0)
    compiled = torch.compile(function, backend=graphs)
    with Negates() as mode:
        found = compiled(x)
    assert torch.equal(found, function(x))
    assert graphs.runs == 2, "one on each side of `item`"
    assert "_local_scalar_dense.default" in mode.names
    assert graphs.targets and not any("neg" in target for target in graphs.targets)
