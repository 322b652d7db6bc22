"""Plans on models: put on, taken off, names that do not fit, models that recompute already, and compiled code.

What apply leaves alone in a model, and how it composes with hooks, threads and exceptions, is in test_lifecycle.py.
"""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import hugging_face_flag
import recollect
from block_plans import ROWS, block_plan, full, mean_square, ops, stack
from gradients import assert_same_gradients, gradients
from recollect._torch_parallel import fake_process_group
from recollect.errors import AlreadyAppliedError, ArgumentError, PlanError, PlanMismatchWarning, UnknownNameError
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import module_of
from zoo import ZOO

LLAMA, GPT2 = ZOO["llama"], ZOO["gpt2"]

# A plan comes off again


def test_recomputes_what_the_plan_says_until_it_is_removed() -> None:
    model = stack()
    plain = ops(model, ROWS)
    applied = recollect.apply(model, block_plan("gelu"))
    assert ops(model, ROWS) - plain == {"gelu": 3}
    applied.remove()
    assert ops(model, ROWS) == plain
    assert not any("forward" in vars(module) for module in model.modules())


def test_context_manager_removes_after_an_exception() -> None:
    model = stack()
    with pytest.raises(KeyError, match="stop"), recollect.apply(model, block_plan("gelu")):
        raise KeyError("stop")
    assert recollect.applied_to(model) == []


def test_suspended_and_back() -> None:
    model = stack()
    plain = ops(model, ROWS)
    with recollect.apply(model, block_plan("gelu")) as applied:
        with applied.suspended():
            assert ops(model, ROWS) == plain
            assert recollect.applied_to(model) == []
        assert recollect.applied_to(model) == [applied]
        assert ops(model, ROWS) - plain == {"gelu": 3}


def test_handle_in_words() -> None:
    model = stack()
    applied = recollect.apply(model, block_plan("gelu"))
    assert repr(applied) == "<plan applied to Stack>"
    applied.remove()
    assert repr(applied) == "<plan removed from Stack>"


def test_nothing_stays_of_a_plan_on_two_engines_whose_layers_share_a_module() -> None:
    """The layer that cannot be traced wraps the module around what the tape has put there."""
    model, plan = stack(), block_plan("gelu")
    model.blocks[1].norm = model.blocks[0].norm
    model.blocks[0].up.register_forward_hook(lambda *given: bool(given[2].data_ptr()) and None)
    first = UnitPlan(plan.units["blocks.0"].actions, engine="graph")
    with recollect.apply(model, Plan({**plan.units, "blocks.0": first})), pytest.warns(match="run on the tape"):
        for _ in range(2):
            mean_square(model(ROWS)).backward()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_models_that_share_a_module(order: int) -> None:
    """Each has its plan, and loses it by itself, as models of YOLO with one activation for all."""
    models = stack(), stack()
    models[1].blocks[0].norm = models[0].blocks[1].norm
    plain = [gradients(model, ROWS, mean_square) for model in models]
    applied = [recollect.apply(model, block_plan("gelu")) for model in models]
    assert [recollect.applied_to(model) for model in models] == [[one] for one in applied]
    for model, expected in zip(models, plain, strict=True):
        assert_same_gradients(expected, gradients(model, ROWS, mean_square))
        assert ops(model, ROWS)["gelu"] == 6
    with pytest.raises(AlreadyAppliedError):
        recollect.apply(models[0], block_plan("gelu"))
    for one in applied[::order]:
        one.remove()
    assert not any("forward" in vars(module) for model in models for module in model.modules())


def test_a_block_with_a_handle_that_was_removed() -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters())
    for make in (
        lambda: recollect.apply(model, block_plan("gelu")),
        lambda: recollect.attach(model, optimizer, "1GiB"),
    ):
        with make() as handle:
            pass
        with (
            pytest.raises(ArgumentError, match=r"^with <.*removed from Stack.*>: it was removed, .* once more\.$"),
            handle,
        ):
            pass


def test_plan_that_recomputes_nothing_leaves_the_modules_alone() -> None:
    model = stack()
    with recollect.apply(model, block_plan()):
        assert not any("forward" in vars(module) for module in model.modules())


def test_forward_of_the_instance_is_put_back() -> None:
    """Somebody has put a `forward` on a module already."""
    model = stack()
    expected = gradients(model, ROWS, mean_square)
    block = model.blocks[0]
    own = block.forward

    def mine(hidden: Tensor) -> Tensor:
        return own(hidden)

    vars(block)["forward"] = mine
    with recollect.apply(model, block_plan("gelu", "up.addmm")):
        assert_same_gradients(expected, gradients(model, ROWS, mean_square))
    assert vars(block)["forward"] is mine


def _twice(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return forward(forward(hidden))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copy_of_a_model_with_a_plan_has_none(copied: Callable[[nn.Module], nn.Module]) -> None:
    """And it has the forward that somebody else has put on a module."""
    model, plan = stack(), block_plan("gelu")
    vars(model.blocks[0])["forward"] = functools.partial(_twice, model.blocks[0].forward)
    model.blocks[1].more = nn.ModuleList()
    plain = ops(model, ROWS)
    with recollect.apply(model, plan) as applied:
        twin = copied(model)
        assert recollect.applied_to(twin) == []
        assert ops(twin, ROWS) == plain
        recollect.apply(twin, plan)
        assert recollect.applied_to(model) == [applied]
        assert ops(twin, ROWS) == ops(model, ROWS) != plain


def test_deep_copy_of_a_model_with_a_plan_dies_with_its_last_name() -> None:
    """And not at a garbage collection, before which a loop that makes copies may run out of memory."""
    model = stack()
    vars(model.blocks[0])["forward"] = functools.partial(_twice, model.blocks[0].forward)
    with recollect.apply(model, block_plan("gelu")):
        twin = copy.deepcopy(model)
    assert [name for name, module in twin.named_modules() if "forward" in vars(module)] == ["blocks.0"]
    block = weakref.ref(twin.blocks[1])
    gc.disable()
    try:
        del twin
        assert block() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))], ids=["deepcopy", "pickle"])
def test_plan_can_be_copied(copied: Callable[[Plan], Plan]) -> None:
    plan = full(stack(), ROWS, mean_square)
    assert copied(plan) == plan


# Names that the model does not have


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("block.1", r"Did you mean 'blocks\.1'"),
        ("blocks.7", r"Did you mean 'blocks\.\d'"),
        ("something.else.entirely", r"It has \d+: 'stem', 'blocks', 'blocks\.0' and \d+ more\.$"),
    ],
)
@pytest.mark.parametrize("unit", [UnitPlan({}), UnitPlan({"gelu": "recompute"})])
def test_unknown_unit(path: str, advice: str, unit: UnitPlan) -> None:
    model = stack()
    with pytest.raises(UnknownNameError, match=rf"^Stack has no unit '{path}'\. {advice}"):
        recollect.apply(model, Plan({"blocks.0": UnitPlan({"gelu": "recompute"}), path: unit}))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("mlp.up_prj.mm", r"Did you mean 'mlp\.up_proj\.mm'\?"),
        ("self_atn.q_proj.mm#1", r"Did you mean 'self_attn\.q_proj\.mm#1'\?"),
        ("input_layernrm.mul", r"Did you mean 'input_layernorm\.mul'\?"),
        ("zzz.mm", r"It has \d+: 'input_layernorm', 'mlp', 'mlp\.act_fn' and \d+ more\.$"),
    ],
)
@pytest.mark.parametrize("action", ["keep", "recompute"])
def test_unknown_value(name: str, advice: str, action: Any) -> None:
    plan = Plan({"model.layers.1": UnitPlan({name: action, "mlp.up_proj.mm": "recompute"})})
    with pytest.raises(UnknownNameError, match=rf"^unit 'model\.layers\.1' has no value '{name}'\. {advice}"):
        recollect.apply(LLAMA.model(), plan)


def test_plan_for_another_model() -> None:
    plan = full(GPT2.model(), GPT2.data())
    with pytest.raises(UnknownNameError, match=r"^LlamaForCausalLM has no unit 'transformer\.h\.0'\. It has \d+"):
        recollect.apply(LLAMA.model(), plan)


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("add", ""),
        ("add#1", ""),
        ("topk.0", ""),
        ("mlp.down_proj.mm#1", "mlp.down_proj"),
        ("mlp.down_proj.topk.0", "mlp.down_proj"),
        ("experts.0.mm", "experts.0"),
        ("experts.0.topk#2.1", "experts.0"),
        ("attn.mylib:op", "attn"),
    ],
)
def test_module_part_of_a_name(name: str, scope: str) -> None:
    assert module_of(name) == scope


def test_wrapped_models_are_refused() -> None:
    model = stack()
    recollect.apply(model, block_plan("gelu"))
    with pytest.raises(
        AlreadyAppliedError, match=r"module 'blocks\.0' recomputes already, by a recollect plan; .*remove"
    ):
        recollect.apply(model, block_plan("up.addmm"))
    wrapped = stack()
    wrapped.blocks[1] = checkpoint_wrapper(wrapped.blocks[1])
    with pytest.raises(
        AlreadyAppliedError, match=r"'blocks\.1' .* by torch's CheckpointWrapper; .*checkpoint_wrapper\.$"
    ):
        recollect.apply(wrapped, block_plan("gelu", paths=("blocks.0",)))
    llama: Any = LLAMA.model()
    plan = full(llama, LLAMA.data())
    hugging_face_flag.enable(llama)
    with pytest.raises(AlreadyAppliedError, match=r"by Hugging Face's gradient checkpointing; .*_disable\(\) first"):
        recollect.apply(llama, plan)


@pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("frees", [True, False])
def test_an_output_is_dropped_only_where_its_parameters_stay(frees: bool, is_wrapped: bool) -> None:
    """Another unit's backward asks for it, before FSDP2 or FSDP1 has gathered what it is made of."""
    from torch.distributed import fsdp

    with fake_process_group(0, 2):
        model: Any = stack()
        path = "blocks.0"
        if is_wrapped:
            policy = fsdp.wrap.ModuleWrapPolicy({type(model.blocks[0])})
            strategy = fsdp.ShardingStrategy.FULL_SHARD if frees else fsdp.ShardingStrategy.SHARD_GRAD_OP
            model = fsdp.FullyShardedDataParallel(model, None, strategy, None, policy, device_id=torch.device("cpu"))
            path = f"_fsdp_wrapped_module.{path}"
        else:
            fsdp.fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=frees)
        plan = Plan({path: UnitPlan({}, output="recompute")})
        if frees:
            with pytest.raises(PlanError, match=rf"drops the output of unit '{path}', whose parameters FSDP frees"):
                recollect.apply(model, plan)
        else:
            recollect.apply(model, plan)
        assert bool(recollect.applied_to(model)) is not frees


# Compiled code


class WithCompiled(nn.Module):
    """A layer with a compiled module inside. [n, 16] -> [n, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.inner: Any = torch.compile(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), backend="aot_eager"
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(self.norm(hidden)).sin()


def compiled() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(WithCompiled(), WithCompiled())


# Dynamo looks at `.grad` of whatever it meets.
ignores_grad_of_non_leaf = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")


@ignores_grad_of_non_leaf
def test_compiled_module_inside_of_a_layer() -> None:
    """It is one opaque op to the tape: what it saves is kept, and what is around it is recomputed."""
    model = compiled()
    expected = gradients(model, ROWS, mean_square)
    plan = recollect.classic_plan(recollect.record(model, ROWS, loss_fn=mean_square), "full")
    with recollect.apply(model, plan):
        assert_same_gradients(expected, gradients(model, ROWS, mean_square))
    assert_same_gradients(expected, gradients(model, ROWS, mean_square))


def test_plan_of_the_model_as_one_unit() -> None:
    """Its path is empty; messages call it the model."""
    model, data = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(4, 8)
    profile = recollect.record(model, data, loss_fn=torch.sum)
    plan = recollect.classic_plan(profile, "full")
    assert str(plan).splitlines()[0].startswith("the model ")
    with pytest.raises(UnknownNameError, match=r"^the model has no value '7\.relu'"):
        recollect.apply(model, Plan({"": UnitPlan({"7.relu": "keep"})}))
    with (
        recollect.apply(model, plan),
        pytest.raises(
            AlreadyAppliedError, match=r"^cannot apply a plan: the model recomputes already, by a recollect plan"
        ),
    ):
        recollect.apply(model, plan)
    relu = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    message = r"this model: the model computes '1\.\w+', which the plan does not name"
    with recollect.apply(relu, plan), pytest.warns(PlanMismatchWarning, match=message):
        relu(data).sum().backward()
