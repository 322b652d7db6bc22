"""What a plan costs and saves, counted exactly: ops that run again, in which order, and bytes that stay.

The layer below is small enough to do the sums by hand. Legend: T tokens, D width, F inner width, H heads; float32.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blocks import Computes
from policies import FULL, KEEP_ALL, NOTHING_KEPT, Only, Policy
from recollect.applying import apply_policy
from recollect.plans.action import Action
from tiers import long_but
from watch import Watch

T, D, F_, H = 10, 16, 40, 2
FLOAT_BYTES = 4


def attention() -> Computes:
    """Causal self-attention. [t, d] -> [t, d]."""

    def attend(self: Any, hidden: Tensor) -> Any:
        heads = [part(hidden).view(1, T, H, D // H).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(T, D))

    return Computes(attend, **{f"{name}_proj": nn.Linear(D, D, bias=False) for name in "qkvo"})


def feed_forward() -> Computes:
    """SwiGLU. [t, d] -> [t, d]."""
    wide = {f"{name}_proj": nn.Linear(D, F_, bias=False) for name in ("gate", "up")}
    down = nn.Linear(F_, D, bias=False)
    return Computes(lambda self, x: self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), **wide, down_proj=down)


def decoder_layer() -> Computes:
    """[t, d] -> [t, d]."""

    def run(self: Any, hidden: Tensor) -> Any:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))

    return Computes(run, norm1=nn.LayerNorm(D), norm2=nn.LayerNorm(D), attention=attention(), mlp=feed_forward())


SDPA = "_scaled_dot_product_flash_attention_for_cpu"
NORMS = frozenset(f"{norm}.native_layer_norm.{i}" for norm in ("norm1", "norm2") for i in range(3))

# What autograd saves of one layer in the plain step, in bytes; the layer's output is counted apart.
SAVED_BYTES: dict[str, int] = {
    "norm1.native_layer_norm.0": T * D,
    "norm1.native_layer_norm.1": T,
    "norm1.native_layer_norm.2": T,
    "attention.q_proj.mm": T * D,
    "attention.k_proj.mm": T * D,
    "attention.v_proj.mm": T * D,
    f"attention.{SDPA}.0": T * D,
    f"attention.{SDPA}.1": T * H,
    "add": T * D,
    "norm2.native_layer_norm.0": T * D,
    "norm2.native_layer_norm.1": T,
    "norm2.native_layer_norm.2": T,
    "mlp.gate_proj.mm": T * F_,
    "mlp.silu": T * F_,
    "mlp.up_proj.mm": T * F_,
    "mlp.mul": T * F_,
}
SAVED_BYTES = {name: FLOAT_BYTES * elements for name, elements in SAVED_BYTES.items()}
OUTPUT_BYTES = FLOAT_BYTES * T * D

# plan -> (what runs again for each layer). In "full", only the second residual sum and the product before it need not.
EVERYTHING = Counter({"native_layer_norm": 2, "mm": 6, SDPA: 1, "add": 1, "silu": 1, "mul": 1})
RERUN: dict[str, tuple[Policy, Counter[str]]] = {
    "keep all": (KEEP_ALL, Counter()),
    "full": (FULL, EVERYTHING),
    "norms": (Only(NORMS), Counter({"native_layer_norm": 2})),
    "first norm's result": (Only(frozenset({"norm1.native_layer_norm.0"})), Counter({"native_layer_norm": 1})),
    "activation": (Only(frozenset({"mlp.silu", "mlp.mul"})), Counter({"silu": 1, "mul": 1})),
    "one product": (Only(frozenset({"attention.v_proj.mm"})), Counter({"mm": 1})),
    "sum": (Only(frozenset({"attention.o_proj.mm", "add"})), Counter({"mm": 1, "add": 1})),
    "sum of a kept product": (Only(frozenset({"add"})), Counter({"add": 1})),
    "attention": (Only(frozenset({f"attention.{SDPA}.0", f"attention.{SDPA}.1"})), Counter({SDPA: 1})),
    "never needed": (Only(frozenset({"mlp.down_proj.mm", "attention.o_proj.mm"})), Counter()),
    "chain": (
        Only(frozenset({"norm2.native_layer_norm.0", "mlp.gate_proj.mm", "mlp.up_proj.mm", "mlp.silu", "mlp.mul"})),
        Counter({"native_layer_norm": 1, "mm": 2, "silu": 1, "mul": 1}),
    ),
}
every_plan = pytest.mark.parametrize("plan", RERUN)
every_depth = pytest.mark.parametrize("depth", long_but([3], [1, 3]))


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(decoder_layer() for _ in range(count)))


def units(model: nn.Sequential) -> Sequence[str]:
    return [str(index) for index in range(len(model))]


def data() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(T, D)


def ops_in_backward(model: nn.Sequential, policy: Policy | None) -> Watch:
    model.zero_grad()
    with nullcontext() if policy is None else apply_policy(model, units(model), policy):
        # From forward on: what runs again runs under the dispatch modes of forward.
        with Watch() as watch:
            loss = model(data()).sum()
            watch.history.clear()
            loss.backward()
    return watch


@every_plan
@every_depth
def test_ops_that_run_again(plan: str, depth: int) -> None:
    policy, expected = RERUN[plan]
    model = layers(depth)
    again = ops_in_backward(model, policy).computing_ops()
    again.subtract(ops_in_backward(model, None).computing_ops())
    assert +again == Counter({name: depth * count for name, count in expected.items()})
    assert not -again


def test_dropped_outputs_run_the_rest_of_the_layer_again() -> None:
    """All layers but the last: nobody needs what the last one returned. No value is computed twice."""
    depth = 3
    model = layers(depth)
    again = ops_in_backward(model, NOTHING_KEPT).computing_ops()
    again.subtract(ops_in_backward(model, None).computing_ops())
    rest = Counter({"mm": 1, "add": 1})
    assert again == Counter({name: depth * EVERYTHING[name] + (depth - 1) * rest[name] for name in again})


def test_ops_run_again_when_they_are_needed_and_not_before() -> None:
    """Backward of each op of `cos(sigmoid(exp(x)))` asks for its own input or output, from the last to the first."""
    model = nn.Sequential(Computes(lambda _, x: x.exp().sigmoid().cos()))
    with apply_policy(model, ["0"], Only(frozenset({"exp", "sigmoid"}))):
        with Watch() as watch:
            loss = model(data().requires_grad_()).sum()
            watch.history.clear()
            loss.backward()
    ours = [name for name in watch.history if name in {"exp", "sigmoid", "sin", "sigmoid_backward", "cos"}]
    # cos: its input is sigmoid(exp(x)), so both run now; sigmoid and exp find their results.
    assert ours == ["exp", "sigmoid", "sin", "sigmoid_backward"]


def kept_bytes(model: nn.Sequential, policy: Policy | None) -> int:
    """Bytes alive after forward that were not there before, less the last layer's output, which the caller holds."""
    hidden = data()
    with nullcontext() if policy is None else apply_policy(model, units(model), policy), Watch() as watch:
        output = model(hidden)
        kept = watch.live_bytes() - output.nbytes
        loss = output.sum()
        del output
    loss.backward()
    return kept


def expected_kept_bytes(policy: Policy, depth: int) -> int:
    """Saved values that are not dropped, and the outputs between layers.

    A dropped value leaves its arguments to keep, if those are not saved anyway: "sum" keeps nothing more, because the
    chain below it ends in values that are saved, but "sum of a kept product" has to hold the product.
    """
    kept = sum(nbytes for name, nbytes in SAVED_BYTES.items() if policy.action("", name) == Action.KEEP)
    if (policy.action("", "add"), policy.action("", "attention.o_proj.mm")) == (Action.RECOMPUTE, Action.KEEP):
        kept += OUTPUT_BYTES
    return depth * kept + (depth - 1) * (OUTPUT_BYTES if policy.output_action("") == Action.KEEP else 0)


@every_plan
@every_depth
def test_kept_bytes(plan: str, depth: int) -> None:
    """The plain step keeps what "keep all" keeps."""
    policy, _ = RERUN[plan]
    model, expected = layers(depth), expected_kept_bytes(policy, depth)
    assert kept_bytes(model, policy) == expected
    assert plan != "keep all" or kept_bytes(model, None) == expected
    assert kept_bytes(model, NOTHING_KEPT) == 0


def peak_bytes(model: nn.Sequential, policy: Policy | None) -> int:
    """Most bytes alive at once in a step whose gradients were there before."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hidden = data()
    with (
        nullcontext() if policy is None else apply_policy(model, units(model), policy),
        Watch(follows_peak=True) as watch,
    ):
        model(hidden).sum().backward()
    return watch.peak_bytes


@every_plan
def test_peak_grows_with_depth_by_what_is_kept(plan: str) -> None:
    """One layer more costs what the plan keeps of it, exactly: the working set of a layer does not add up."""
    policy, _ = RERUN[plan]
    growth = peak_bytes(layers(7), policy) - peak_bytes(layers(4), policy)
    assert growth == 3 * (expected_kept_bytes(policy, 2) - expected_kept_bytes(policy, 1))


def test_nothing_stays_alive_after_backward() -> None:
    model = layers(3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with apply_policy(model, units(model), FULL), Watch() as watch:
        model(data()).sum().backward()
        assert watch.live_bytes() == 0


def test_a_cast_that_names_its_own_device_is_dropped() -> None:
    """PyTorch's `rms_norm` in bf16 ends in one; a copy to another device would be kept."""
    model = nn.Sequential(Computes(lambda _, x: x.to(dtype=torch.float64, device=x.device).exp().sin()))
    with apply_policy(model, ["0"], FULL):
        with Watch() as watch:
            loss = model(data().requires_grad_()).sum()
            watch.history.clear()
            loss.backward()
    assert [name for name in watch.history if name in {"_to_copy", "exp", "cos"}][:3] == ["_to_copy", "exp", "cos"]
