"""Each private name of the compiler that the compile engine uses still does what the engine rests on."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from blocks import Computes
from compiled_blocks import IGNORED
from compiled_units import without_code
from recollect import _torch_compile as fence
from recollect._torch_dynamo import module_stack
from recollect.engine.compiled.partitioner import PlanPartitioner

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), IGNORED]


def unit() -> Computes:
    """[n, 8] -> [n, 8]."""
    parts = {"linear": nn.Linear(8, 8), "drop": nn.Dropout(0.5)}
    return Computes(lambda self, rows: self.drop(self.linear(rows).sin()).cos(), **parts)


class Seen(PlanPartitioner):
    """Holds on to the joint graph, and to what the cut is asked for with it."""

    joints: list[tuple[fx.GraphModule, dict[str, Any]]] = []  # noqa: RUF012

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.joints.append((gm, kwargs))
        return super().__call__(gm, joint_inputs, **kwargs)


@pytest.fixture(name="joint")
def joint_graph() -> fx.GraphModule:
    Seen.joints.clear()
    without_code(unit().forward, Seen(None))(torch.randn(4, 8, requires_grad=True))
    ((joint, settings),) = Seen.joints
    assert settings["num_fwd_outputs"] >= 1
    return joint


def node_of(joint: fx.GraphModule, op: str) -> fx.Node:
    return next(node for node in joint.graph.nodes if str(node.target) == op)


def test_nodes_tell_where_they_are_from(joint: fx.GraphModule) -> None:
    sine, product = node_of(joint, "aten.sin.default"), node_of(joint, "aten.addmm.default")
    assert fence.traced_op(sine) is torch.ops.aten.sin.default
    ((call, path),) = module_stack(product)
    assert call and path == "linear" and module_stack(sine) == []
    assert fence.autograd_number(sine) != fence.autograd_number(product) is not None
    backward = [node for node in joint.graph.nodes if fence.is_of_backward(node)]
    assert backward and sine not in backward and node_of(joint, "aten.mm.default") in backward


def test_random_numbers_have_seeds(joint: fx.GraphModule) -> None:
    assert [node.op for node in joint.graph.nodes if fence.is_seeds(node)] == ["call_function"]
    drawn = [node for node in joint.graph.nodes if fence.is_made_by_inductor(node) and not fence.is_seeds(node)]
    assert {fence.traced_op(node) for node in drawn} == {torch.ops.aten.native_dropout.default}


def test_tags_are_policies(joint: fx.GraphModule) -> None:
    node = node_of(joint, "aten.sin.default")
    for keep, policy in ((True, CheckpointPolicy.MUST_SAVE), (False, CheckpointPolicy.MUST_RECOMPUTE)):
        fence.set_policy(node, keep=keep)
        assert node.meta["recompute"] is policy and fence.has_policy(node)
    fence.clear_policy(node)
    assert not fence.has_policy(node)


def test_equal_nodes_are_merged() -> None:
    def twice(rows: Tensor) -> Tensor:
        return rows.sin() + rows.sin()

    joint = torch.fx.experimental.proxy_tensor.make_fx(twice)(torch.ones(2))
    fence.merge_equal_nodes(joint)
    assert sum(str(node.target) == "aten.sin.default" for node in joint.graph.nodes) == 1


def test_effects_have_a_name() -> None:
    assert str(torch.ops.higher_order.with_effects) == "with_effects"


def test_what_cannot_be_compiled_raises_one_of_the_errors() -> None:
    def broken(rows: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return rows.sin()

    with pytest.raises(fence.ERRORS):
        fence.CompiledWhole(broken, {}).trace(torch.ones(2))
    often = torch.compile(lambda rows: rows.sin(), backend="eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(fence.ERRORS):
        for size in range(4):
            often(torch.ones(size + 2))


def test_settings_are_where_they_are_looked_for() -> None:
    assert list(fence.settings_in_the_way()) == []
    assert not fence.has_new_settings()
    for setting in (torch.compiler.set_stance("force_eager"), torch._dynamo.compiled_autograd._enable(torch.compile)):
        with setting:
            assert fence.has_new_settings() and len(list(fence.settings_in_the_way())) == 1
    for what in (torch.sin, torch.nn.Linear(2, 2)):
        for fullgraph in (False, True):
            compiled: Any = functools.partial(torch.compile, what, fullgraph=fullgraph)
            assert fence.settings_of(compiled())["triton.cudagraphs"] is False
            assert fence.settings_of(compiled(mode="reduce-overhead"))["triton.cudagraphs"] is True
            assert fence.settings_of(compiled(backend="aot_eager")) is None
