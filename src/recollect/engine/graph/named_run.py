"""Runs Dynamo's graph of a unit, with the module that each op belongs to."""

from typing import Any

import torch
from torch import fx

from recollect._torch_private import HigherOrderOperator
from recollect.engine.graph.recorder import Recorder
from recollect.programs.cut import UntraceableError
from recollect.tensors import tensors_in


def reads_constant(graph: fx.GraphModule) -> bool:
    """Whether a graph reads a tensor that is a constant of its code."""
    values = (getattr(graph, str(node.target), None) for node in graph.graph.find_nodes(op="get_attr"))
    return any(isinstance(value, torch.Tensor) for value in values)


class NamedRun(fx.Interpreter):
    """Runs Dynamo's graph, and tells the recorder which module each op belongs to."""

    def __init__(self, graph: fx.GraphModule, recorder: Recorder, paths: dict[str, str | None]) -> None:
        super().__init__(graph)
        self._recorder = recorder
        self._paths = paths

    def run_or_leave(self, *args: Any) -> Any:
        """Run the graph; if that fails, leave the contexts that it has entered: autocast, levels of `torch.func`."""
        try:
            return self.run(*args)
        except BaseException:
            nodes, num_open = list(self.graph.nodes), 0
            for node in nodes[nodes.index(self._last) + 1 :]:
                step = _enters(node)
                num_open += step
                if step < 0 and num_open < 0:
                    num_open = 0
                    super().run_node(node)
            raise

    def run_node(self, n: fx.Node) -> Any:
        self._last = n
        self._recorder.scope = self._paths.get(n.name) or ""
        result = super().run_node(n)
        if isinstance(n.target, HigherOrderOperator):
            tensors = tensors_in(result)
            # In torch 2.11 Functions that write to their results, whose gradients then come out as zeros.
            if len(set(map(id, tensors))) < len(tensors):
                raise UntraceableError("a Function in it returns the same tensor twice when it is traced")
        return result


def _enters(node: fx.Node) -> int:
    """Return 1 for a node that enters a context, which ends at a later node, for which this is -1; else 0."""
    name = getattr(node.target, "__name__", "")
    if name.startswith("_enter_") or name.endswith("_increment_nesting") or name == "_saved_tensors_hooks_disable":
        return 1
    return -(name.startswith("_exit_") or name.endswith("_decrement_nesting") or name == "_saved_tensors_hooks_enable")
