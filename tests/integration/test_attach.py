"""`attach` in loops that know nothing of it: same weights, plans by shape, and a word where the budget cannot hold."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import hugging_face_flag
import recollect
from gradients import assert_same_weights
from recollect.attaching.attached import Attached
from recollect.engine.content import has_same_bits
from recollect.errors import (
    AlreadyAppliedError,
    ArgumentError,
    BudgetTooSmallError,
    BudgetWarning,
    LargerStepError,
    RecordError,
)
from recollect.measuring.meter import measure_peak
from recollect.recording.restored_state import free_gradients
from residual_model import Residual

Loop = Callable[[nn.Module, Optimizer], None]


@dataclass
class Output:
    loss: Tensor


class Words(nn.Module):
    """A language model of a few ops. Tokens and labels of [n, t] -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(3)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return Output(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words()


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config).train()


def batches(lengths: Sequence[int], rows: int = 4) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for length in lengths:
        tokens = torch.randint(0, 64, (rows, length), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


def attached_to(
    make: Callable[[], nn.Module], budget: int | str = "95%", **options: Any
) -> tuple[Any, Optimizer, Attached]:
    model = make()
    optimizer = AdamW(model.parameters())
    return model, optimizer, recollect.attach(model, optimizer, budget, **options)


def train(model: nn.Module, optimizer: Optimizer, given: Iterable[dict[str, Tensor]]) -> None:
    for batch in given:
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def commonest_loop(*lengths: int) -> Loop:

    def run(model: nn.Module, optimizer: Optimizer) -> None:
        torch.manual_seed(2)
        train(model, optimizer, batches(lengths))

    return run


def run_both(loop: Loop, budget: int | str = "95%", make: Callable[[], nn.Module] = words, **options: Any) -> Attached:
    """Run a loop without and with `attach`, and compare the weights to which it leads."""
    plain = make()
    loop(plain, AdamW(plain.parameters()))
    model, optimizer, attached = attached_to(make, budget, **options)
    loop(model, optimizer)
    assert_same_weights(plain, model)
    return attached


def test_one_line_and_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    attached = run_both(commonest_loop(64, 64, 48, 64), "80%", llama)
    assert attached.plan is not None
    assert attached.recorded_steps == [0]
    assert attached.num_steps == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("recollect: ") and " budget, predicted peak " in line and "planned for 4 x 64 in " in line
    report = attached.report()
    assert "4 steps, 1 of them recorded" in report and "not counted: " in report and "optimizer state" in report
    assert (
        "The output holds a cache for generation (past_key_values): free it by model.config.use_cache = False."
        in report
    )
    assert repr(attached) == "<attached to LlamaForCausalLM, 1 planned>"


def test_a_longer_batch_is_recorded_and_planned_and_plans_are_swapped() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        attached = run_both(commonest_loop(32, 64, 32, 48, 64))
    assert attached.recorded_steps == [0, 1]
    assert [str(step.calls[0]) for step in attached.planned] == ["4 x 32", "4 x 64"]


def test_the_peak_of_every_step_is_within_the_budget() -> None:
    model, optimizer, attached = attached_to(llama, "80%")
    held: dict[str, Any] = {}

    def step(batch: dict[str, Tensor]) -> None:
        held["out"] = model(**batch)
        held["out"].loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, batch in enumerate(batches((64,) * 6)):
        if number == 0:
            step(batch)
            continue
        # The last output is in memory, and nothing else; the batch is not the planner's.
        start_bytes = sum(p.nbytes for p in model.parameters()) * 3 + sum(b.nbytes for b in model.buffers())
        start_bytes += sum(s["step"].nbytes for s in optimizer.state.values())
        start_bytes += held["out"].logits.nbytes + held["out"].loss.nbytes
        start_bytes += sum(layer.keys.nbytes + layer.values.nbytes for layer in held["out"].past_key_values.layers)
        peak_bytes = measure_peak(lambda batch=batch: step(batch), device="cpu", baseline_bytes=start_bytes).peak_bytes
        assert attached.budget_bytes is not None and peak_bytes <= attached.budget_bytes


def test_what_cannot_fit_later_says_so_and_runs_at_its_leanest() -> None:
    with (
        pytest.warns(
            BudgetWarning, match=r"while it was recorded, a step of 4 x 512 needed .* as nothing leaner was known"
        ),
        pytest.warns(BudgetWarning, match=r"no plan fits a step of 4 x 512 into .*: it needs .* at its leanest"),
    ):
        attached = run_both(commonest_loop(64, 512), "90%")
    assert not attached.planned[-1].fits


def test_what_is_held_beside_the_step_is_named_where_nothing_fits_any_more() -> None:
    model, optimizer, _ = attached_to(words, "80%")
    loop = commonest_loop(32, 32, 32)
    loop(model, optimizer)
    copies = [copy.deepcopy(model) for _ in range(32)]
    beside = r"at its leanest, [0-9.]+ MiB of it as room for what other steps do or hold, which"
    with pytest.warns(BudgetWarning, match=beside):
        loop(model, optimizer)
    assert copies


def test_what_cannot_fit_at_first_is_an_error_of_the_optimizers_step() -> None:
    """It shows no frame of ours; the handle cannot be copied, which the error of that says."""
    model, optimizer, attached = attached_to(words, "10KiB")
    message = (
        r"^recollect\.attach\(budget='10KiB'\), after the first step: 10\.0 KiB .* is below .* Call attached\.remove"
    )
    with pytest.raises(BudgetTooSmallError, match=message) as refused:
        commonest_loop(32)(model, optimizer)
    assert [frame.name for frame in refused.traceback][-2:] == ["train", "wrapper"]
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(
            ArgumentError, match=r"^cannot copy or pickle <attached to .* Save its plan, plan\.save\(path\)"
        ):
            copied(attached)


def test_larger_steps_can_be_refused_or_warned_of() -> None:
    model, optimizer, _ = attached_to(words, "90%", on_larger="raise")
    with pytest.raises(
        LargerStepError, match=r"a step of 4 x 64 is not covered by the plan, which was made for 4 x 32"
    ):
        commonest_loop(32, 64)(model, optimizer)
    model, optimizer, attached = attached_to(words, "90%", on_larger="warn")
    with pytest.warns(BudgetWarning, match="its peak may exceed the budget"):
        commonest_loop(32, 64, 64)(model, optimizer)
    assert attached.recorded_steps == [0]


def test_accumulation_of_any_length_after_two() -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> None:
        torch.manual_seed(3)
        for count in (2, 4, 3):
            for batch in batches((32,) * count):
                (model(**batch).loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert run_both(run, "90%").recorded_steps == [0], "every later micro-batch is as the second one"


def test_a_pair_and_a_single_call_of_one_shape_both_run_under_the_plan_of_the_pair() -> None:
    model, optimizer, attached = attached_to(words)
    (batch,) = batches((32,))

    def step(num_calls: int) -> None:
        sum(model(**batch).loss for _ in range(num_calls)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    with pytest.warns(
        BudgetWarning, match="step 1 called the model 2 times, and its plan foresees 1. It may have needed"
    ):
        step(2)
    for num_calls in (1, 2, 1):
        step(num_calls)
    assert attached.recorded_steps == [0, 2, 3], "the pair is seen too late in the second step"
    pair = attached.planned[-1]
    assert len(pair.calls) == 2
    assert attached.plan is pair.plan
    lines = [line.partition(": predicted peak ")[0] for line in attached.report().splitlines()]
    named = {f"{step}, as in step {(0, 2, 3)[step.number]}" for step in attached.planned if step is not pair}
    assert {*named, f"2 calls of {pair.calls[0]}, as in step {(0, 2, 3)[pair.number]}"} <= set(lines)


@pytest.mark.parametrize("is_seen", [True, False])
def test_gradients_alive_in_forward_are_foreseen_by_zero_grad_or_recorded_once_more(is_seen: bool) -> None:
    lines: list[str] = []

    def run(model: nn.Module, optimizer: Optimizer) -> None:
        torch.manual_seed(3)
        for batch in batches((32,) * 4):
            loss = model(**batch).loss
            optimizer.zero_grad() if is_seen else free_gradients(model.parameters())
            loss.backward()
            optimizer.step()

    attached = run_both(run, log=lines.append)
    assert attached.recorded_steps == ([0] if is_seen else [0, 1])
    said = [line.startswith("recollect: zero_grad() before forward, not after it, would free ") for line in lines]
    assert said == ([True, False] if is_seen else [False, False])
    # A percentage is of the steps that repeat, which have gradients in forward.
    repeated = attached.planned[-1]
    assert repeated.budget_bytes == attached.budget_bytes == int(0.95 * repeated.plain_peak_bytes)


def test_two_models_with_two_optimizers() -> None:
    def run(attach: bool) -> tuple[list[nn.Module], Attached | None]:
        torch.manual_seed(0)
        generator, critic = Residual(), Residual()
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic)]
        attached = None
        if attach:
            attached = recollect.attach({"g": generator, "c": critic}, optimizers, "95%")
        for _ in range(4):
            noise, real = torch.randn(64, 32), torch.randn(64, 32)
            optimizers[1].zero_grad()
            (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (-critic(generator(noise)).mean()).backward()
            optimizers[0].step()
        return [generator, critic], attached

    plain, _ = run(False)
    models, attached = run(True)
    for one, other in zip(plain, models, strict=True):
        assert_same_weights(one, other)
    assert attached is not None and attached.num_steps == 4
    assert {path.split(".")[0] for path in attached.plan.units} == {"g", "c"}


def test_evaluation_generation_and_copies_are_not_disturbed() -> None:
    model, optimizer, attached = attached_to(llama, "90%")
    commonest_loop(32, 32)(model, optimizer)
    (batch,) = batches((16,))
    model.eval()
    with torch.no_grad():
        loss = model(**batch).loss
    tokens = model.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
    model.train()
    assert attached.num_steps == 2 and attached.recorded_steps == [0]
    twin = copy.deepcopy(model)
    assert recollect.applied_to(twin) == []
    assert all(type(vars(module).get("forward")).__module__.split(".")[0] != "recollect" for module in twin.modules())
    buffer = io.BytesIO()
    pickle.dump(twin, buffer)
    attached.remove()
    attached.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    model.eval()
    with torch.no_grad():
        assert has_same_bits(loss, model(**batch).loss)
    assert torch.equal(tokens, model.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False))


def test_frozen_parameters_need_no_new_plan_and_thawed_ones_do() -> None:
    model, optimizer, attached = attached_to(words)
    frozen = model.layers[0]
    frozen.requires_grad_(False)
    train(model, optimizer, batches((32, 32)))
    assert attached.recorded_steps == [0]
    model.layers[1].requires_grad_(False)
    train(model, optimizer, batches((32,)))
    assert attached.recorded_steps == [0]
    frozen.requires_grad_(True)
    train(model, optimizer, batches((32,)))
    assert attached.recorded_steps == [0, 3]


def test_a_model_in_eval_mode_is_named() -> None:
    model, optimizer, attached = attached_to(words)
    model.eval()
    (batch,) = batches((32,))
    model(**batch).loss.backward()
    with pytest.warns(
        BudgetWarning, match="step 0 ran in eval mode, .*: call model.train\\(\\) first if that is not meant"
    ):
        optimizer.step()
    optimizer.zero_grad()
    model.train()
    train(model, optimizer, [batch])
    assert attached.recorded_steps == [0, 1]


def test_the_inputs_of_a_frozen_model_are_trained() -> None:
    """As a soft prompt or an image is; a frozen model in eval mode is meant so."""

    def trained(budget: str | None) -> Tensor:
        torch.manual_seed(0)
        model, inputs = Residual(inner=128).requires_grad_(False).eval(), torch.randn(256, 32, requires_grad=True)
        optimizer = torch.optim.Adam([inputs])
        attached = None if budget is None else recollect.attach(model, optimizer, budget, log=lambda _: None)
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert attached is None or (attached.plan is not None and attached.plan.predicted_slowdown)
        return inputs.detach()

    assert has_same_bits(trained("85%"), trained(None))


def put_wrappers_on(model: Any) -> None:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        (hugging_face_flag.enable, "Hugging Face's gradient checkpointing"),
        (put_wrappers_on, "torch's CheckpointWrapper"),
    ],
)
def test_another_mechanism_switched_on_later_is_refused(switch: Callable[[Any], None], name: str) -> None:
    model, optimizer, _ = attached_to(llama)
    first, second = batches((32, 32))
    train(model, optimizer, [first])
    switch(model)
    with pytest.raises(AlreadyAppliedError, match=f"recomputes already, by {name}"):
        model(**second)


class Passing(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_step_beside_a_profiler_or_a_mode_is_not_recorded_but_the_next_one_is() -> None:
    model, optimizer, attached = attached_to(words)
    first, second, third = batches((32, 32, 32))
    with pytest.warns(BudgetWarning, match="a profiler is active"), torch.profiler.profile():
        model(**first).loss.backward()
    optimizer.step()
    with pytest.warns(BudgetWarning, match="a dispatch mode is active"), Passing():
        loss = model(**second).loss
    loss.backward()
    optimizer.step()
    assert attached.recorded_steps == [] and "no step was recorded yet" in attached.report()
    optimizer.zero_grad()
    train(model, optimizer, [third])
    assert attached.recorded_steps == [2]


def test_messages() -> None:
    model = llama()
    optimizer = AdamW(model.parameters())
    with pytest.raises(RecordError, match="on_larger: got 'plan', expected 'replan', 'warn' or 'raise'"):
        recollect.attach(model, optimizer, on_larger="plan")  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="got no optimizer, expected the one whose step ends a training step"):
        recollect.attach(model, [])
    with pytest.raises(RecordError, match="none of the .* parameters of AdamW is a parameter of this LlamaForCausalLM"):
        recollect.attach(llama(), optimizer)
    with pytest.raises(RecordError, match="model '1' is a str, expected a torch.nn.Module"):
        recollect.attach([model, "critic"], optimizer)  # type: ignore[list-item]
    with pytest.raises(
        RecordError, match=r"log: got 'train\.log', expected a function that takes the line, such as print"
    ):
        recollect.attach(model, optimizer, log="train.log")  # type: ignore[arg-type]
    with recollect.attach(model, optimizer, "95%"):
        with pytest.raises(
            AlreadyAppliedError, match=r"is attached already\. Remove that first: attached\.remove\(\)\."
        ):
            recollect.attach(model, optimizer, "95%")
        with pytest.raises(
            AlreadyAppliedError, match=r"it is attached to a loop, or captured\. First call attached\.remove"
        ):
            recollect.fit(model, torch.ones(1, 4, dtype=torch.int64), "95%", optimizer=optimizer)
        with pytest.raises(AlreadyAppliedError, match=r"remove that plan first: attached\.remove\(\)\."):
            recollect.record(model, torch.ones(1, 4, dtype=torch.int64))
    hugging_face_flag.enable(model)
    with pytest.raises(AlreadyAppliedError, match="Hugging Face's gradient checkpointing"):
        recollect.attach(model, optimizer, "95%")
    assert not any("forward" in vars(module) for module in model.modules())


def test_sparse_gradients_that_are_alive_in_forward() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(50, 32, sparse=True), *layers)
    optimizer = torch.optim.SGD(model.parameters())
    attached = recollect.attach(model, optimizer, "1GiB")
    for rows in (4, 8):
        loss = model(torch.arange(rows)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert attached.recorded_steps == [0, 1]
    attached.remove()
    assert model[0].weight.grad.is_sparse
    recollect.record(model, step=lambda: model(torch.arange(8)).square().mean().backward())
