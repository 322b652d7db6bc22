"""Applying a plan and taking it off again: nothing else about the model, the process or the memory changes."""

import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

from blocks import Stack, built, mean_square, partitioned
from gradients import assert_same_gradients, call, clear, gradients, loss_of, step_of
from policies import FEW_PLANS, FULL, KEEP_ALL, NOTHING_KEPT, Policy, Random
from recollect.applying import apply_policy
from recollect.errors import AlreadyAppliedError
from tiers import long_but
from watch import Watch, live_tensors
from zoo import ZOO

LLAMA = ZOO["llama"]
few_plans = pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
SOME = ("llama", "gpt2", "t5", "resnet", "transformer")
some_cases = pytest.mark.parametrize("name", SOME)


def _what_a_user_sees(model: nn.Module) -> dict[str, Any]:
    return {
        "state dict": list(model.state_dict()),
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "repr": repr(model),
    }


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def _what_is_inside(model: nn.Module) -> dict[str, Any]:
    return {
        name: (type(module), sorted(vars(module)), [dict(getattr(module, hooks)) for hooks in HOOKS])
        for name, module in model.named_modules()
    }


@some_cases
def test_apply_and_remove_change_nothing_else(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    seen, inside = _what_a_user_sees(model), _what_is_inside(model)
    applied = apply_policy(model, case.layers, FULL)
    assert _what_a_user_sees(model) == seen
    step_of(case, model)
    assert _what_a_user_sees(model) == seen
    for _ in range(2):  # To remove a plan twice is harmless.
        applied.remove()
    assert _what_a_user_sees(model) == seen
    assert _what_is_inside(model) == inside
    assert not any("forward" in vars(module) for module in model.modules())


def test_removed_between_forward_and_backward() -> None:
    """What was dropped in forward is still recomputed after the plan is gone."""
    model = LLAMA.model()
    expected = step_of(LLAMA, model)
    applied = apply_policy(model, LLAMA.layers, NOTHING_KEPT)
    loss = loss_of(call(model, LLAMA.data()))
    applied.remove()
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[f"gradient of {parameter_name}"])


def test_hooks_of_the_user_run_once_and_in_order() -> None:
    def events_of(model: nn.Module) -> list[str]:
        events: list[str] = []
        layer = model.get_submodule(LLAMA.layers[0])
        for path, module in {"layer": layer, "mlp": layer.get_submodule("mlp")}.items():
            module.register_forward_pre_hook(lambda *_, at=path: events.append(f"{at} pre"))
            module.register_forward_hook(lambda *_, at=path: events.append(f"{at} post"))
            module.register_full_backward_pre_hook(lambda *_, at=path: events.append(f"{at} backward pre"))
            module.register_full_backward_hook(lambda *_, at=path: events.append(f"{at} backward"))
        step_of(LLAMA, model)
        return events

    expected = events_of(LLAMA.model())
    model = LLAMA.model()
    with apply_policy(model, LLAMA.layers, FULL):
        assert events_of(model) == expected


@some_cases
def test_state_dict_survives_a_round_trip(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    expected = step_of(case, model)
    with apply_policy(model, case.layers, FULL):
        step_of(case, model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        plain = case.build().train()
        plain.load_state_dict(torch.load(file))
        model.load_state_dict(plain.state_dict())
        assert_same_gradients(expected, step_of(case, plain))
        assert_same_gradients(expected, step_of(case, model))


class StoppedError(Exception):
    """Raised on purpose in the middle of a forward."""


@few_plans
@pytest.mark.parametrize("where", ["", ".mlp", ".self_attn.o_proj"])
def test_exception_in_forward(policy: Policy, where: str) -> None:
    model = LLAMA.model()
    expected = step_of(LLAMA, model)

    def stop(*_: Any) -> None:
        raise StoppedError

    with apply_policy(model, LLAMA.layers, policy):
        handle = model.get_submodule(LLAMA.layers[1] + where).register_forward_hook(stop)
        for _ in range(2):
            with pytest.raises(StoppedError):
                call(model, LLAMA.data())
        handle.remove()
        assert_same_gradients(expected, step_of(LLAMA, model))
    with Watch() as watch:
        torch.ones(2) + 1
    assert watch.ops["add"] == 1


@few_plans
def test_exception_in_backward(policy: Policy) -> None:
    model = LLAMA.model()
    expected = step_of(LLAMA, model)

    def stop(*_: Any) -> None:
        raise StoppedError

    with apply_policy(model, LLAMA.layers, policy):
        parameter = model.get_submodule(LLAMA.layers[0]).mlp.down_proj.weight
        handle = parameter.register_hook(stop)
        with pytest.raises(StoppedError):
            step_of(LLAMA, model)
        handle.remove()
        assert_same_gradients(expected, step_of(LLAMA, model))


@few_plans
def test_nested_units(policy: Policy) -> None:
    """A unit inside a unit: each of them applies its own plan, or the apply says that it cannot be done."""
    model = LLAMA.model()
    expected = step_of(LLAMA, model)
    units = [path for layer in LLAMA.layers for path in (layer, f"{layer}.mlp", f"{layer}.self_attn")]
    with apply_policy(model, units, policy):
        assert_same_gradients(expected, step_of(LLAMA, model))


def test_a_second_plan_is_refused_and_the_first_stays() -> None:
    model = LLAMA.model()
    expected = step_of(LLAMA, model)
    with apply_policy(model, [f"{layer}.mlp" for layer in LLAMA.layers], FULL):
        for units in (LLAMA.layers, [f"{LLAMA.layers[0]}.mlp.act_fn"], [f"{LLAMA.layers[0]}.mlp"]):
            with pytest.raises(
                AlreadyAppliedError,
                match=r"module 'model\.layers\.0\.mlp.*remove that plan first: for .*: applied\.remove\(\)",
            ):
                apply_policy(model, units, FULL)
        assert_same_gradients(expected, step_of(LLAMA, model))
        with apply_policy(model, [f"{layer}.self_attn" for layer in LLAMA.layers], Random(1)):
            assert_same_gradients(expected, step_of(LLAMA, model))
    with apply_policy(model, LLAMA.layers, FULL):
        assert_same_gradients(expected, step_of(LLAMA, model))


@pytest.mark.parametrize("name", long_but(["llama", "resnet"], SOME))
def test_no_tensor_is_left_behind(name: str) -> None:
    """Without help from the cycle collector, a step leaves no tensors and no bytes, differentiated or not."""
    case = ZOO[name]
    model = case.model()

    def step(model: nn.Module) -> None:
        clear(model, case.data())
        loss_of(call(model, case.data()), case.loss_fn).backward()
        loss_of(call(model, case.data()), case.loss_fn)
        clear(model, case.data())

    def growth() -> tuple[int, int]:
        step(model)
        before = live_tensors()
        with Watch() as watch:
            for _ in range(3):
                step(model)
        return live_tensors() - before, watch.live_bytes()

    gc.collect()
    gc.disable()
    try:
        expected = growth()
        for policy in (KEEP_ALL, FULL, NOTHING_KEPT, Random(1)):
            with apply_policy(model, case.layers, policy):
                assert growth() == expected, policy
    finally:
        gc.enable()


def test_nothing_is_held_while_nothing_is_dropped_in_no_grad() -> None:
    model = LLAMA.model()
    with apply_policy(model, LLAMA.layers, FULL), torch.no_grad(), Watch() as watch:
        output = call(model, {**LLAMA.data(), "use_cache": False})
        held = output.loss.nbytes + output.logits.nbytes
        del output
        assert watch.live_bytes() < held


@few_plans
def test_partitioned_frozen_parameters(policy: Policy) -> None:
    """As ZeRO-3 partitions them: by whole blocks, or as DeepSpeed each linear layer and norm by itself."""
    model: Stack = built(Stack)
    for block in model.blocks:
        block.norm.requires_grad_(False)
        block.up.requires_grad_(False)
    rows = torch.randn(6, 16)
    expected = gradients(model, rows, mean_square)
    leaves = [module for block in model.blocks for module in block.children()]
    for modules in (leaves, list(model.blocks)):
        with partitioned(modules), apply_policy(model, model.layers, policy):
            assert_same_gradients(expected, gradients(model, rows, mean_square))


@few_plans
def test_a_cache_grows_once(policy: Policy) -> None:
    """Transformers' flag avoids this by switching the cache off; here it may stay on."""
    for case in (LLAMA, ZOO["llama_padded"]):
        model = case.model()
        expected = step_of(case, model)
        with apply_policy(model, case.layers, policy):
            assert_same_gradients(expected, step_of(case, model))
            output = call(model, case.data())
            output.loss.backward()
            assert output.past_key_values.get_seq_length() == 12
