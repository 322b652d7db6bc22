"""`apply_activation_checkpointing`: which modules, what stays as it is, and what is refused."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import recollect
from block_plans import stack
from blocks import Block, Stack, mean_square
from recollect.checkpointing.op_policy import _offload_from
from recollect.errors import AlreadyAppliedError, ArgumentError, ConfigError, NotYetError


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def new_model() -> Stack:
    return stack(dropout=0.1)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    mean_square(model(torch.randn(8, 16))).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def chosen(model: nn.Module, applied: Any) -> list[str]:
    return [f.path for f in applied._forwards if hasattr(f, "path")]


def test_gradients_names_and_classes_are_the_models_own() -> None:
    expected = gradients(new_model())
    model = new_model()
    names, text = list(model.state_dict()), repr(model)
    with recollect.apply_activation_checkpointing(model, check_fn=is_block) as applied:
        assert chosen(model, applied) == ["blocks.0", "blocks.1", "blocks.2"]
        assert list(model.state_dict()) == names and repr(model) == text
        assert recollect.applied_to(model) == [applied]
        found = gradients(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert recollect.applied_to(model) == []


def test_it_saves_as_much_memory_as_pytorchs() -> None:
    x = torch.randn(512, 16)

    def held_bytes(model: nn.Module) -> int:
        measured = recollect.measure_peak(lambda: model(x), device="cpu", baseline_bytes=0)
        return measured.end_bytes

    plain, ours, pytorchs = new_model(), new_model(), new_model()
    recollect.apply_activation_checkpointing(ours, check_fn=is_block)
    apply_activation_checkpointing(pytorchs, check_fn=is_block)
    # PyTorch's holds the state of the random generator for each block; ours for each random op.
    assert held_bytes(ours) <= held_bytes(pytorchs) < held_bytes(plain) / 4


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            ["blocks.0", "blocks.1", "blocks.2"],
        ),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=2000), ["blocks.0", "blocks.1", "blocks.2"]),
        (
            functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
            ["blocks.0.down", "blocks.0.up", "blocks.1.down", "blocks.1.up", "blocks.2.down", "blocks.2.up"],
        ),
    ],
)
def test_policies_of_fsdp_choose_the_modules_that_they_wrap(policy: Any, expected: list[str]) -> None:
    model, wrapped = new_model(), new_model()
    assert chosen(model, recollect.apply_activation_checkpointing(model, auto_wrap_policy=policy)) == expected
    apply_activation_checkpointing(wrapped, auto_wrap_policy=policy)
    theirs = {
        name.removesuffix("._checkpoint_wrapped_module")
        for name, _ in wrapped.named_modules()
        if name.endswith("_checkpoint_wrapped_module")
    }
    assert sorted(name.replace("_checkpoint_wrapped_module.", "") for name in theirs) == expected


def test_all_modules_are_the_outermost_that_can_be_called() -> None:
    model = new_model()
    applied = recollect.apply_activation_checkpointing(model)
    assert chosen(model, applied) == ["blocks.0", "blocks.1", "blocks.2", "head", "stem"]


def save_products(*, seen: list[Any]) -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        seen.append(op)
        return op is torch.ops.aten.addmm.default

    return create_selective_checkpoint_contexts(policy)


def test_a_wrapper_with_a_policy() -> None:
    seen: list[Any] = []
    context_fn = functools.partial(save_products, seen=seen)
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=context_fn)
    model, expected = new_model(), gradients(new_model())
    with recollect.apply_activation_checkpointing(model, wrapper, is_block):
        assert all(torch.equal(one, other) for one, other in zip(gradients(model), expected, strict=True))
    assert torch.ops.aten.addmm.default in seen
    again = new_model()
    with recollect.apply_activation_checkpointing(again, check_fn=is_block, policy_fn=[torch.ops.aten.addmm.default]):
        assert all(torch.equal(one, other) for one, other in zip(gradients(again), expected, strict=True))


def test_a_policy_that_offloads_in_step_after_step() -> None:
    def offloads(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_activation = op is torch.ops.aten.gelu.default
        return CheckpointPolicy.MUST_CPU_OFFLOAD if is_activation else CheckpointPolicy.PREFER_RECOMPUTE

    pool = _offload_from(torch.device("cpu")).host.pool
    expected, model = gradients(new_model()), new_model()
    with recollect.apply_activation_checkpointing(model, check_fn=is_block, policy_fn=offloads):
        for _ in range(3):
            model.zero_grad()
            assert all(map(torch.equal, gradients(model), expected))
            assert pool.taken_bytes == 0
        output = model(torch.randn(8, 16))
        assert pool.taken_bytes == 3 * 8 * 64 * 4
        del output  # Nobody goes back through this graph; what was last sent away leaves at the next edge.
        gradients(model)
    assert pool.taken_bytes == 0


def test_mistakes() -> None:
    apply = recollect.apply_activation_checkpointing
    model = new_model()
    with pytest.raises(
        ArgumentError, match=r"apply_activation_checkpointing\(model\): got an object of class function as model"
    ):
        apply(is_block)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="it chose no module of Stack"):
        apply(model, check_fn=lambda module: isinstance(module, nn.LSTM))
    with pytest.raises(ConfigError, match="auto_wrap_policy=.*it chose no module"):
        apply(model, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: False)
    with pytest.raises(NotYetError, match="another module around each one"):
        apply(model, offload_wrapper)
    with pytest.raises(NotYetError, match="checkpoint_fn=.*not yet"):
        apply(model, functools.partial(checkpoint_wrapper, checkpoint_fn=checkpoint))
    with pytest.raises(ConfigError, match="each says what to save"):
        wrapper = functools.partial(checkpoint_wrapper, context_fn=functools.partial(save_products, seen=[]))
        apply(model, wrapper, is_block, policy_fn=[])
    with pytest.raises(ConfigError, match="asks for something around a second run"):
        from contextlib import nullcontext

        apply(model, functools.partial(checkpoint_wrapper, context_fn=lambda: (nullcontext(), nullcontext())), is_block)
    assert recollect.applied_to(model) == []
    apply(model, check_fn=is_block)
    with pytest.raises(AlreadyAppliedError, match="recomputes already, by a recollect plan"):
        apply(model, check_fn=is_block)
