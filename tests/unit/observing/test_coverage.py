"""`recollect.coverage`: what is covered, what is not, and why, as it is seen in one step that leaves no traces."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import recollect
from recollect.cli import main
from recollect.errors import NotYetError, RecordError
from recollect.observing.step_watch import StepWatch
from recollect.recording.find_units import find_units
from small_llama import batch_of, llama

ROWS = torch.randn(4, 8)
AGAIN, REENTRANT = partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)
ALL = (0, 1, 2, 3)


class Block(nn.Module):
    """A layer that checkpoints itself if it has the switch and is training."""

    def __init__(self, has_switch: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)
        if has_switch:
            self.gradient_checkpointing = False

    def run(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).relu()))

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "gradient_checkpointing", False) and self.training:
            return AGAIN(self.run, x)
        return self.run(x)


class Other(Block):
    """A layer of another class."""


class Stack(nn.Module):
    """Four layers, of which some are called by a function."""

    def __init__(self, call: Callable[..., Any] = AGAIN, called: tuple[int, ...] = (), **switch: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.call, self.called = nn.Linear(8, 8), call, called
        self.layers = nn.ModuleList(kind(**switch) for kind in (Block, Block, Other, Other))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(-1, 8))
        for number, layer in enumerate(self.layers):
            x = self.call(layer, x) if number in self.called else layer(x)
        return x.sum()


def switched(*, is_on: bool = True, training: bool = True, acts: bool = True) -> Stack:
    model = Stack(has_switch=True).train(training)
    for layer in model.layers:
        layer.gradient_checkpointing = is_on
        if not acts:
            layer.forward = layer.run
    return model


def frozen(model: Stack) -> Stack:
    model.first.requires_grad_(False)
    return model


def wrapped() -> Stack:
    model = Stack()
    for number in (0, 1):
        model.layers[number] = checkpoint_wrapper(model.layers[number])
    return model


def skipping(called: tuple[int, ...]) -> Stack:
    return Stack(lambda layer, x: x, called)


def on_cpu(layer: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return layer(x)  # type: ignore[no-any-return]


def planned(units: tuple[int, ...]) -> Stack:
    model = Stack()
    full = recollect.classic_plan(recollect.record(model, ROWS), "full").units
    recollect.apply(model, recollect.Plan({f"layers.{n}": full[f"layers.{n}"] for n in units}))
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "nothing": (Stack, (), "nothing of it ran again, and nothing in the model asks for that"),
    "checkpoint": (lambda: Stack(AGAIN, (0, 2)), (0, 2), "nothing of it ran again"),
    "reentrant": (lambda: Stack(REENTRANT, (1, 3)), (1, 3), "nothing of it ran again"),
    "parts": (lambda: Stack(lambda layer, x: AGAIN(layer.run, x), ALL), ALL, ""),
    "reentrant parts": (lambda: Stack(lambda layer, x: REENTRANT(layer.run, x), ALL), ALL, ""),
    "wrapper": (wrapped, (0, 1), "nothing of it ran again; its class is Other, that of covered layers is Block"),
    "switch": (switched, ALL, ""),
    "off": (partial(switched, is_on=False), (), "its gradient_checkpointing is False"),
    "not read": (partial(switched, acts=False), (), "its gradient_checkpointing is True, but nothing of it ran again"),
    "eval": (
        partial(switched, training=False),
        (),
        "its gradient_checkpointing is True, but it is in eval mode, where such switches do nothing: call model.train()",
    ),
    "no gradients": (
        lambda: frozen(Stack(REENTRANT, (0,))),
        (),
        "NO GRADIENTS: it ran under torch.no_grad() and never again, and its trained parameters get none. A reentrant "
        "checkpoint does this if none of its inputs requires grad: pass use_reentrant=False, or call "
        "model.enable_input_require_grads()",
    ),
    "not called": (lambda: skipping((0,)), (), "it was not called in the step, other than by its forward itself"),
    "save_on_cpu": (
        lambda: Stack(on_cpu, ALL),
        (),
        "save_on_cpu copies nothing in a step on the CPU: what it saves is there already",
    ),
    "plan": (lambda: planned((1, 3)), (1, 3), "the plan does not name it, so it keeps all"),
    "compiled": (lambda: torch.compile(Stack(AGAIN, (0, 2)), backend="eager"), (0, 2), "nothing of it ran again"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", KINDS)
def test_each_setting_is_seen_at_work_and_leaves_no_traces(kind: str) -> None:
    make, covered, reason = KINDS[kind]
    model = make()
    generator, hooks = torch.get_rng_state(), len(nn.modules.module._global_forward_hooks)
    found = recollect.coverage(model, ROWS)
    assert tuple(number for number, layer in enumerate(found.layers) if layer.covered) == covered
    first = next((layer for layer in found.layers if not layer.covered), None)
    assert (first.reason if first else "") == reason
    assert found.is_compiled == (kind == "compiled")
    assert torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(nn.modules.module._global_forward_hooks) == hooks
    assert recollect.coverage(model, ROWS) == found
    if kind != "compiled":
        assert recollect.coverage(model, ROWS, fake=True).units == found.units


def test_copies_to_the_host_are_offloaded() -> None:

    def offloaded(layer: nn.Module, x: Tensor) -> Tensor:
        hooks = partial(torch.zeros_like, device="cpu"), partial(torch.zeros_like, device="meta")
        with saved_tensors_hooks(*hooks):
            return layer(x)  # type: ignore[no-any-return]

    model = Stack(offloaded, (1,)).to("meta").eval()
    watch = StepWatch(model, find_units(model), torch.device("meta"))
    with watch.watching():
        model(ROWS.to("meta")).backward()
    # The input, what relu made (for it and for the product after it), and both weights.
    assert watch.counts["layers.1"]["offloaded_bytes"] == 4 * (4 * 8 + 2 * 4 * 16 + 2 * 8 * 16)
    assert [watch.counts[f"layers.{n}"]["offloaded_bytes"] for n in (0, 2, 3)] == [0, 0, 0]


def test_plans_that_offload() -> None:
    model, batch = llama(), batch_of()
    full = recollect.coverage(model, batch).layers[1]
    recorded = (
        recollect.classic_plan(recollect.record(model, batch, fake=True), "full").units["decoder.layers.1"].actions
    )
    unit = recollect.UnitPlan({**dict.fromkeys(recorded, "keep"), "mlp.linear_fc1.mm": "offload"})
    with recollect.apply(model, recollect.Plan({"decoder.layers.1": unit})):
        layer = recollect.coverage(model, batch).layers[1]
        assert (layer.covered, layer.recomputed_ops, layer.kept_bytes + layer.offloaded_bytes) == (
            True,
            0,
            full.kept_bytes,
        )
        with pytest.raises(
            NotYetError, match=r"fake=True: not yet: copies of fake tensors to the host memory of the plan"
        ):
            recollect.coverage(model, batch, fake=True)


def test_steps_of_your_own_run_as_they_are() -> None:
    model = Stack(AGAIN, (2,))

    def step() -> None:
        for _ in range(2):
            inputs = ROWS.clone().requires_grad_()
            loss = model(inputs)
            (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
            (loss + gradient.square().sum()).backward()

    found = recollect.coverage(model, step=step)
    assert [layer.covered for layer in found.layers] == [False, False, True, False]
    assert found.layers[2].calls == 2 and found.batch == ""
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_it_refuses() -> None:
    with pytest.raises(
        RecordError, match=r"^coverage\(model, step=\.\.\., fake=True\): got a step, expected a batch: a step "
    ):
        recollect.coverage(Stack(), step=lambda: None, fake=True)
    model = Stack()
    unit = recollect.UnitPlan({}, engine="compile")
    with (
        recollect.apply(model, recollect.Plan({"layers.0": unit})),
        pytest.raises(NotYetError, match="the compiled layers of the plan that is applied"),
    ):
        recollect.coverage(model, ROWS)


TABLE = """\
Stack, float32[4, 8]: 1 of 4 layers covered

              ops  run again  made again   kept  offloaded
first           1          0         0 B  128 B        0 B
layers.{0,2}    4          0         0 B  384 B        0 B  NOT COVERED
layers.1        4          2       512 B  128 B        0 B  covered
layers.3        4          0         0 B  256 B        0 B  NOT COVERED
all else        2          0         0 B    8 B        0 B

3 not covered, because
  layers.0: nothing of it ran again.
  layers.2-3: nothing of it ran again; its class is Other, that of covered layers is Block."""


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="an older PyTorch runs more ops outside of the layers")
def test_table() -> None:
    """A layer keeps relu's result and its own output; nobody needs the last one. Early stop leaves out the last product."""
    assert str(recollect.coverage(Stack(AGAIN, (1,)).eval(), ROWS)) == TABLE


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--size", "tiny", "--num-layers", "4", "--seq-length", "16", "--fake", "--recompute-granularity", "full"]
    out = tmp_path / "coverage.json"
    assert (
        main(["coverage", *flags, "--recompute-method", "block", "--recompute-num-layers", "1", "--json", str(out)])
        == 0
    )
    assert "1 of 4 layers covered" in capsys.readouterr().out
    units = json.loads(out.read_text())["units"]
    assert [unit["name"] for unit in units if unit["covered"]] == ["decoder.layers.0"]
    for words, message in (
        (
            ["--plan", "a", "--recompute-activations"],
            "Error: --plan: got several settings, expected a plan, Megatron's flags or",
        ),
        (
            ["--gradient-checkpointing"],
            "Error: --gradient-checkpointing: got it without --hf-config, expected both: Hugging",
        ),
    ):
        assert main(["coverage", *words]) == 2
        assert message in capsys.readouterr().err
