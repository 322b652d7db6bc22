"""Custom autograd Functions under plans: exact, run again where that is sound and kept where it is not, and predicted."""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import recollect
from blocks import Computes
from budgets import budgets, least_bytes
from function_cases import KEPT, RUN_AGAIN, Forward, Grouped, counts, forwards, grouped
from function_units import UNITS, TwoUnits, two_units
from gradients import assert_same_gradients, gradients
from policies import EVERY_PLAN, FULL, KEEP_ALL, NOTHING_KEPT
from predictions import IDS, LEAN_LOOP
from recollect.applying import apply_policy
from recollect.errors import MutatedValueError, RecomputeMismatchError
from recollect.measuring.meter import measure_peak
from recollect.planning.choose import Planner
from recollect.profile.profile import Profile
from tiers import long, long_but

CPU = torch.device("cpu")
# What is left out are scalars that PyTorch makes out of sight; a KiB is added for them.
MOST_OVER_BYTES = 2048
# The generator's state, put back after a forward has run again; the prediction also counts it when that runs at first.


FUNCTIONS = {**RUN_AGAIN, **KEPT}


def built(forward: Forward) -> tuple[TwoUnits, Tensor]:
    model, data = two_units(forward, CPU, inner=nn.Linear(32, 32))
    model(data)  # The first forward makes the buffers.
    return model, data


def runs_of(model: nn.Module, data: Tensor) -> int:
    forwards.clear()
    gradients(model, data)
    return forwards.total()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact_under_every_plan(name: str) -> None:
    """Thrice each: in the first step of a process the tape looks more closely, and after the second less."""
    model, data = built(FUNCTIONS[name])
    expected = gradients(model, data)
    for plan, policy in EVERY_PLAN.items():
        with apply_policy(model, UNITS, policy):
            for _ in range(3):
                assert_same_gradients(expected, gradients(model, data), plan)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_runs_again(name: str) -> None:
    model, data = built(FUNCTIONS[name])
    once = runs_of(model, data)
    with apply_policy(model, UNITS, KEEP_ALL):
        assert runs_of(model, data) == once
    with apply_policy(model, UNITS, NOTHING_KEPT if name in RUN_AGAIN else FULL):
        assert runs_of(model, data) > once if name in RUN_AGAIN else runs_of(model, data) == once


def profile_of(model: nn.Module, data: Tensor) -> Profile:
    return recollect.record(model, data, units=UNITS, **LEAN_LOOP)


def peak_bytes(model: nn.Module, data: Tensor, profile: Profile) -> int:
    model.zero_grad()
    step = measure_peak(lambda: model(data).backward(), device="cpu")
    return profile.persistent_bytes + step.peak_growth_bytes


@pytest.mark.parametrize("name", [*FUNCTIONS, "counts"])
def test_peak_is_predicted(name: str) -> None:
    model, _ = built({**FUNCTIONS, "counts": counts}[name])
    data = torch.randn(64, 8, 32)
    profile = profile_of(model, data)
    expected = gradients(model, data)
    planner = Planner(profile)
    plans = {str(budget): planner.plan(budget) for budget in budgets(planner, (0, 0.3, 0.7, 1))}
    plans |= {how: recollect.classic_plan(profile, how) for how in ("full", "keep_all")}
    for how, plan in plans.items():
        with recollect.apply(model, plan):
            measured = peak_bytes(model, data, profile)
            assert_same_gradients(expected, gradients(model, data), how)
        predicted = plan.predicted_peak_bytes or 0
        assert measured <= predicted <= measured + MOST_OVER_BYTES, how


def test_a_call_is_one_op_of_the_profile() -> None:
    model, data = built(RUN_AGAIN["kernel"])
    graph = profile_of(model, data).graphs[-1]
    assert [op.name for op in graph.ops if "Kernel" in op.name] == ["Kernel", "Kernel#1"]
    names = {value.name: (value.saved, value.must_keep) for value in graph.values if "Kernel" in value.name}
    assert names == dict.fromkeys(("Kernel.0", "Kernel.1", "Kernel#1.0", "Kernel#1.1"), (True, False))


def test_recorded_twice_it_must_make_the_same_twice() -> None:
    """What depends on more than its arguments is found out while a step is recorded, and kept by every plan."""
    model, data = built(counts)
    graph = profile_of(model, data).graphs[-1]
    made = [value for value in graph.values if "Counts" in value.name]
    assert all(value.must_keep for value in made)


def test_fake_profile_prices_the_ops_inside() -> None:
    model, data = built(RUN_AGAIN["scan"])
    profile = recollect.record(model, data, units=UNITS, fake=True, hardware="H100")
    (op,) = (op for op in profile.graphs[-1].ops if op.name == "Scan")
    assert op.time_s > 20 * max(other.time_s for other in profile.graphs[-1].ops if other.name == "sigmoid")


class _Linear(Grouped):
    __module__ = "transformer_engine.pytorch.module.linear"


@pytest.mark.parametrize(
    ("quantizer", "overlap", "kept"),
    [(None, None, ""), (partial(len), None, "an argument is a partial"), (None, {}, "it may communicate")],
)
def test_functions_of_transformer_engine(
    monkeypatch: Any, recwarn: Any, quantizer: Any, overlap: Any, kept: str
) -> None:
    """In 16 bits they run again; else a warning says that they are kept, once."""
    base = SimpleNamespace(_ub_communicators=overlap)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
    model, data = built(partial(grouped, function=_Linear, quantizer=quantizer))
    dropped = [v.name for v in profile_of(model, data).graphs[-1].values if "Linear" in v.name and not v.must_keep]
    assert bool(dropped) == (not kept)
    told = [str(warning.message) for warning in recwarn]
    assert len(told) == bool(kept)
    assert all(f"No plan can drop what Transformer Engine's _Linear makes and saves: {kept}" in text for text in told)


def test_gradients_of_gradients() -> None:
    model, data = built(RUN_AGAIN["set_up"])
    weights = [model.stem.weight, *(unit.get_parameter("weight") for unit in model.units)]

    def step() -> list[Tensor]:
        first = torch.autograd.grad(model(data), weights, create_graph=True)
        return list(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), weights))

    expected = step()
    for policy in EVERY_PLAN.values():
        with apply_policy(model, UNITS, policy):
            assert all(torch.equal(one, other) for one, other in zip(expected, step(), strict=True))


class _Reads(torch.autograd.Function):
    """Reads a tensor that is no argument."""

    table = torch.ones(32)

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        forwards["_Reads"] += 1
        return x * _Reads.table

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * _Reads.table


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_table_that_changes(has_changed: bool) -> None:
    """Before backward that is refused; and one that has changed before is not trusted, so that nothing runs again."""
    _Reads.table = torch.ones(32).mul_(2) if has_changed else torch.ones(32)
    model, data = built(lambda unit, hidden: _Reads.apply(hidden.sin()).exp().cos())
    with apply_policy(model, UNITS, FULL):
        assert runs_of(model, data) == (2 if has_changed else 4)
        if not has_changed:
            loss = model(data)
            _Reads.table.mul_(2)
            with pytest.raises(MutatedValueError, match="used by _Reads in units"):
                loss.backward()


class _Shaped(torch.autograd.Function):
    """Takes its shape from somewhere else."""

    width = 32

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x[..., : _Shaped.width] * 1

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_another_shape_the_second_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = built(lambda unit, hidden: _Shaped.apply(hidden.sin()).exp().cos())
    with apply_policy(model, UNITS, FULL):
        loss = model(data)
        monkeypatch.setattr(_Shaped, "width", 16)
        with pytest.raises(RecomputeMismatchError, match="'_Shaped' made tensors of other shapes"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
def test_what_runs_outside_of_units_is_left_alone() -> None:
    """PyTorch's own class is changed once, and a call without a plan does what it always did."""
    model, data = built(RUN_AGAIN["kernel"])
    expected = gradients(model, data)
    with apply_policy(model, UNITS, FULL):
        gradients(copy.deepcopy(model), data)
    assert_same_gradients(expected, gradients(model, data))
    compiled = torch.compile(lambda x: recollect_test_cube(x) * 2, backend="eager", fullgraph=True)
    x = torch.randn(4, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 6 * x.detach() ** 2)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        result: Tensor = gradient * 3 * x**2
        return result


recollect_test_cube = _Cube.apply


# Quantized training, whose layers are such functions.


# torchao's float8 tensors multiply out of a recording's sight: the fp32 operands of an emulated product in backward.
OPERAND_BYTES = 4 * 96 * (192 + 64) * 4


def _lora(base: nn.Module, width: int, out_width: int) -> Computes:
    """A frozen linear with a trained product of two narrow matrices beside it."""
    parts = {
        "drop": nn.Dropout(0.1),
        "down": nn.Linear(width, 4, bias=False),
        "up": nn.Linear(4, out_width, bias=False),
    }
    return Computes(lambda self, x: self.base(x) + self.up(self.down(self.drop(x))), base=base, **parts)


def _llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes, **IDS))


def _with_linears(model: Any, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for module in list(model.model.layers.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, make(child))
    result: nn.Module = model
    return result


def _qlora() -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")

    def quantized(linear: nn.Linear) -> nn.Module:
        four_bit = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
        )
        four_bit.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        return _lora(four_bit.to("cpu"), linear.in_features, linear.out_features)

    model = _llama().requires_grad_(False)
    _with_linears(model, quantized)
    model.enable_input_require_grads()
    return model


def _float8(recipe: str) -> nn.Module:
    float8 = pytest.importorskip("torchao.float8", reason="needs torchao")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model: nn.Module = float8.convert_to_float8_training(
        _llama(), config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    return model


_FLOAT8 = [partial(_float8, recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]


def _mxfp8() -> nn.Module:
    config = pytest.importorskip("torchao.prototype.moe_training.config", reason="needs torchao")
    from torchao.quantization import quantize_

    recipe = config.MXFP8TrainingOpConfig.from_recipe(config.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    model = _llama().bfloat16()
    quantize_(model, recipe, filter_fn=lambda module, name: type(module) is nn.Linear and name != "lm_head")
    return model


def _peak_bytes(model: nn.Module, batch: dict[str, Tensor], profile: Profile) -> int:
    model.zero_grad()

    def step() -> None:
        model(**batch).loss.backward()

    return profile.persistent_bytes + measure_peak(step, device="cpu").peak_growth_bytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", [_qlora, *long_but(_FLOAT8[:1], _FLOAT8), *long([_mxfp8])])
def test_as_lean_as_checkpointing_and_exact(make: Callable[[], Any]) -> None:
    model = make().train()
    tokens = torch.randint(0, 64, (4, 96))
    batch = {"input_ids": tokens, "labels": tokens}
    profile = recollect.record(model, batch, **LEAN_LOOP)
    expected = gradients(model, batch)
    least = least_bytes(profile)
    plans = [
        recollect.plan(profile, least),
        recollect.plan(profile, round(1.3 * least)),
        recollect.classic_plan(profile, "full"),
    ]
    for plan in plans:
        with recollect.apply(model, plan):
            measured = _peak_bytes(model, batch, profile)
            assert_same_gradients(expected, gradients(model, batch))
        unseen_bytes = OPERAND_BYTES if make in _FLOAT8 else 0
        assert measured - unseen_bytes <= (plan.predicted_peak_bytes or 0) <= measured + MOST_OVER_BYTES
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = _peak_bytes(model, batch, profile)
    assert least < checkpointed
    # Full recompute frees some values later than the tool does.
    assert (plans[-1].predicted_peak_bytes or 0) <= 1.01 * checkpointed
