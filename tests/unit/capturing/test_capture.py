"""A captured step has the bits of the plain one, in a real loop; what cannot be captured is refused.

On a CPU a function that runs again stands in for the graph (`support/repeated_runs.py`). `tests/gpu/test_capture.py` has
real ones.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import recollect
from recollect.capturing.captured_step import CapturedStep
from recollect.capturing.held import StaticBatch
from recollect.errors import AlreadyAppliedError, ArgumentError, BudgetTooSmallError, ConfigError
from recollect.recording.model_step import Step
from repeated_runs import RepeatedRuns
from tiers import long_but

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(64, 256), nn.BatchNorm1d(256)
        self.down, self.drop = nn.Linear(256, 64), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.norm(self.up(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.unused = nn.Linear(3, 3)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(64.0)
        x = x + self.table
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def batch_of(rows: int = 512) -> Batch:
    return torch.randn(rows, 64), torch.randn(rows, 64)


def captured(model: nn.Module, optimizer: Any = None, budget: int | str = "80%", **options: Any) -> CapturedStep:
    batch = options.pop("batch", None)
    given = Step(model, batch_of() if batch is None else batch, None, optimizer, holds_output=False)
    given.gradients = options.pop("gradients", "freed")
    lines: list[str] = []
    return CapturedStep(given, budget, graphs=partial(RepeatedRuns, model), log=lines.append, **options)


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[Batch], torch.Tensor],
    micro_batches: int,
    autocast: bool,
) -> list[torch.Tensor]:
    torch.manual_seed(7)
    losses = []
    for number in range(6):
        for _ in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                losses.append(step(batch_of(256 if number % 3 == 2 else 512)))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *model.state_dict().values(), torch.rand(1)]


LOOPS = [
    ("tape", "freed", True),
    ("tape", "accumulated", False),
    ("graph", "freed", False),
    ("graph", "accumulated", False),
]


@pytest.mark.parametrize(("engine", "gradients", "autocast"), long_but(LOOPS[::3], LOOPS, are_rows=True))
def test_a_loop_has_the_bits_of_the_plain_one(engine: Any, gradients: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain)]
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        step = captured(model, optimizers[0], engine=engine, gradients=gradients)
    assert step.plan.predicted_slowdown
    assert step.predicted_bytes <= (step.plan.budget_bytes or 0)

    def plain_step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = plain(*batch)
        loss.backward()
        return loss.detach()

    micro_batches = 2 if gradients == "accumulated" else 1
    got = trained(model, optimizers[0], step, micro_batches, autocast)
    expected = trained(plain, optimizers[1], plain_step, micro_batches, autocast)
    assert all(map(torch.equal, got, expected))
    assert model.unused.weight.grad is None
    assert str(step) == f"<captured step of Model: 2 graphs in a pool of {step.predicted_pool_bytes >> 20}.0 MiB>"
    step.remove()
    assert str(step) == "<removed step of Model>"
    assert not recollect.applied_to(model)


def test_capture_changes_nothing() -> None:
    model = Model()
    model.layers[0].up.weight.grad = gradient = torch.ones(256, 64)
    fired: list[torch.Tensor] = []
    model.layers[0].up.weight.register_post_accumulate_grad_hook(fired.append)
    batch, before, random = batch_of(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    captured(model, batch=batch, gradients="accumulated").remove()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert model.layers[0].up.weight.grad is gradient
    # By the capture, which repeats what they compute.
    assert len(fired) == 1


class Asking(Model):
    """Computes more while a graph is captured, as transformers' models make masks then."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.answers.append(torch.cuda.is_current_stream_capturing())
        return super().forward(x.cos().exp() if self.answers[-1] else x, y)


def test_code_that_asks_is_told_of_the_capture_from_the_recording_on() -> None:
    model, asked = Asking(), torch.cuda.is_current_stream_capturing
    with captured(model, torch.optim.AdamW(model.parameters())) as step:
        step(batch_of())
        assert len(model.answers) >= 6 and all(model.answers)
    assert torch.cuda.is_current_stream_capturing is asked


@pytest.mark.parametrize("given", ["", "attention_mask", "position_ids"])
def test_models_of_transformers_make_masks_only_for_what_later_batches_may_change(given: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64, use_cache=False))
    tokens = torch.randint(64, (2, 128))
    more = {"attention_mask": torch.ones_like(tokens), "position_ids": torch.arange(128).expand(2, 128)}
    batch = {"input_ids": tokens, "labels": tokens, **({given: more[given]} if given else {})}
    eager = recollect.record(model, batch, holds_output=False, gradients="freed")
    with captured(model, batch=batch, budget="100%") as step:
        found = step._last.profile
    assert (list(map(ops_of, found.graphs)) == list(map(ops_of, eager.graphs))) == (not given)


def ops_of(graph: Any) -> list[str]:
    return [op.name for op in graph.ops]


def test_given_gradients_are_added_to() -> None:
    model = Model().eval()
    step, batch = captured(model, gradients="accumulated"), batch_of()
    step(batch)
    once = model.layers[0].up.weight.grad.clone()  # type: ignore[union-attr]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step(batch)
    # 1 + x is not exact, but it is in both.
    assert torch.equal(model.layers[0].up.weight.grad, torch.ones(256, 64) + once)  # type: ignore[arg-type]


def test_each_call_has_its_own_loss_and_gradients() -> None:
    step, batch = captured(model := Model().eval()), batch_of()
    first = step(batch)
    value, gradient = first.clone(), model.layers[0].up.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    other = step(batch_of())
    assert torch.equal(first, value)
    assert not torch.equal(first, other)
    assert not first.requires_grad
    model.zero_grad()
    assert torch.equal(step(batch), value)
    assert torch.equal(model.layers[0].up.weight.grad, gradient)  # type: ignore[arg-type]


def test_a_budget_in_percent_is_of_the_first_kind() -> None:
    model = Model()
    step = captured(model)
    first_bytes = step.plan.budget_bytes
    step(batch_of(256))
    assert step.plan.budget_bytes == first_bytes


def test_a_failed_kind_leaves_the_others() -> None:
    model = Model()
    step, batch = captured(model), batch_of()
    with pytest.raises(BudgetTooSmallError, match="is below the least possible peak"):
        step(batch_of(2048))
    loss = step(batch)
    assert loss.isfinite()


def test_a_capture_that_fails_leaves_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graphs: RepeatedRuns, step: Callable[[], torch.Tensor]) -> Any:
        step()
        raise RuntimeError("operation not permitted when stream is capturing")

    model = Model()
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedRuns, "capture", fail)
        with pytest.raises(RuntimeError, match="not permitted"):
            captured(model)
    assert not recollect.applied_to(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    captured(model).remove()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            lambda model, step: step(batch_of()),
            ConfigError,
            r"got gradients='freed': the last step's gradients are there, which this step would replace\. Call "
            r"optimizer\.zero_grad\(\) before each step \(set_to_none=True, the default\); or capture with "
            r"gradients=\"accumulated\"\.",
        ),
        (
            lambda model, step: (model.zero_grad(), model.double()),
            ConfigError,
            r"got recollect\.capture='captured': 'weight' of the model has moved since: the graph would still use its old "
            r"memory\. Call remove\(\) and capture the step again; or load weights with assign=False, which copies them\.",
        ),
        (
            lambda model, step: (model.zero_grad(), model.eval()),
            ConfigError,
            r"got most_graphs=1: the batch \(float32\[512, 64\] \(2 times\)\) is of one more kind, and each kind has a graph "
            r"of its own\. Pad batches to fewer shapes, drop the last one \(drop_last=True\), or pass a larger most_graphs=\.",
        ),
        (
            lambda model, step: step.remove(),
            ArgumentError,
            r"step\(batch\): it was removed, and its graphs are gone\. Capture the step once more\.",
        ),
    ],
    ids=["gradients", "moved", "kinds", "removed"],
)
def test_what_a_step_refuses(
    change: Callable[[Model, CapturedStep], object], error: type[Exception], text: str
) -> None:
    model = Model()
    step = captured(model, most_graphs=1)
    step(batch_of())
    change(model, step) if error is not ConfigError or "gradients" not in text[:20] else None
    with pytest.raises(error, match=text):
        step(batch_of())


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (
            (torch.randn(512, 64, requires_grad=True), torch.randn(512, 64)),
            ConfigError,
            r"got batch='float32\[512, 64\] \(2 times\)': one of its tensors requires grad, and a captured step returns no "
            r"gradients of its batch\. Detach it, or run the step without recollect\.capture\.",
        ),
        (
            (torch.randn(512, 64), {1}),
            ArgumentError,
            r"step\(batch\): got float32\[512, 64\], set, in which something is neither a tensor nor hashable; expected "
            r"tensors, numbers and texts, which a captured step can tell apart\.",
        ),
    ],
    ids=["requires grad", "not hashable"],
)
def test_batches_that_are_refused(batch: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        captured(Model(), batch=batch)


def test_the_batch_of_a_graph_is_where_the_step_runs() -> None:
    """Lengths on the host, which a model reads without waiting for a device, would be those of the first batch for good."""
    given = {"lengths": torch.tensor([3, 2]), "task": "translate"}
    held = StaticBatch(given, torch.device("meta")).batch
    assert held["lengths"].is_meta
    assert held["task"] == "translate"


def test_one_plan_at_a_time() -> None:
    model, batch = Model(), batch_of()
    optimizer = torch.optim.SGD(model.parameters())
    with captured(model, optimizer):
        where = r"First call step\.remove\(\), where step = recollect\.capture\(\.\.\.\)\."
        with pytest.raises(AlreadyAppliedError, match=where):
            recollect.fit(model, batch, "80%")
        with pytest.raises(AlreadyAppliedError, match=r"Remove that first: step\.remove\(\), where step = "):
            recollect.attach(model, optimizer, "80%")
        text = r"cannot capture a step of Model: it has a plan or is attached already\. Remove that first: step\.remove\(\)"
        with pytest.raises(AlreadyAppliedError, match=text):
            captured(model, optimizer)
    recollect.fit(model, batch, "80%")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {},
            r"got recollect\.capture='Model', device='cpu': CUDA graphs repeat kernels of a CUDA device\. Move the model "
            r"there; or use recollect\.fit or attach, which run on any device\.",
        ),
        (
            {"engine": "compile"},
            r"got engine='compile': a captured step does not have it\. Pass 'tape', 'graph' or 'auto'\.",
        ),
        (
            {"gradients": "held"},
            r"got gradients='held': a captured step does not have it\. Pass 'freed' or 'accumulated'\.",
        ),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], text: str) -> None:
    model = Model()
    with pytest.raises(ConfigError, match=text):
        recollect.capture(model, batch_of(), torch.optim.SGD(model.parameters()), "80%", **options)
