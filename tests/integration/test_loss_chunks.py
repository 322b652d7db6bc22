"""Loss chunks from recording to training: recollect's own model, Hugging Face's as they are, and models that cannot."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import gradients as steps
import rank_programs
import recollect
from gradients import Step, assert_same_gradients, call
from predictions import LEAN_LOOP
from rank_programs import run_on_ranks
from recollect.cli import main
from recollect.errors import AlreadyAppliedError, BudgetTooSmallError, ChunkedLossError, PlanError, PlanFormatError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.planning.loss_chunks import COUNTS, plan_with_chunks
from recollect.plans.plan import Plan
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from tiers import long_but
from zoo import ZOO

WORDS = 32768
IN_8 = Plan({}, loss_chunks=8)
# Sums in another order, in fp32: a few units of the last place of the largest, measured 1e-7 to 9e-7.
SAME_BUT_FOR_THE_ORDER = 3e-6

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def reference(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": WORDS, **changes}
    return GPTModel(llama_config(**config))


def hugging_face(family: str = "Llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def batch_of(model: nn.Module, words: int = WORDS, length: int = 64) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(words, (2, length))
    return {"tokens" if isinstance(model, GPTModel) else "input_ids": tokens, "labels": tokens.clone()}


def gradients(model: nn.Module, batch: dict[str, Any]) -> Step:
    return steps.gradients(model, batch, lambda output: output.loss)


def assert_close(expected: Step, got: Step, tolerance: float = SAME_BUT_FOR_THE_ORDER) -> None:
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        off = (tensor.double() - got[name].double()).norm() / tensor.double().norm().clamp(min=1e-30)
        assert off < tolerance, name


def run_step(model: nn.Module, batch: dict[str, Any]) -> None:
    call(model, batch).loss.backward()


LARGE: dict[str, Callable[[], nn.Module]] = {
    "reference": reference,
    "reference, tied": lambda: reference(share_embeddings_and_output_weights=True),
    "Hugging Face": lambda: hugging_face(vocab_size=WORDS, hidden_size=64),
    "Hugging Face, bf16": lambda: hugging_face(vocab_size=WORDS, hidden_size=64).bfloat16(),
}


@pytest.mark.parametrize("num_chunks", long_but([1, 8], [1, 2, 8]))
@pytest.mark.parametrize("name", LARGE)
def test_predicted_peak_is_the_measured_one(name: str, num_chunks: int) -> None:
    model = LARGE[name]()
    batch = batch_of(model)
    profile = recollect.record(model, batch, loss_chunks=num_chunks, **LEAN_LOOP)
    fake = recollect.record(model, batch, loss_chunks=num_chunks, fake=True, **LEAN_LOOP)
    assert profile.loss_chunks == fake.loss_chunks == num_chunks
    for plan in (recollect.classic_plan(profile, "keep_all"), recollect.classic_plan(profile, "full")):
        assert plan.loss_chunks == num_chunks
        with recollect.apply(model, plan):
            measured = recollect.measure_peak(partial(run_step, model, batch)).peak_growth_bytes
        model.zero_grad()
        peak_bytes = profile.persistent_bytes + measured
        assert plan.predicted_peak_bytes is not None
        # Room for scalars made out of sight is added, so not below.
        assert 0 <= plan.predicted_peak_bytes - peak_bytes <= 0.005 * peak_bytes
        if "bf16" not in name:  # a fake step knows nothing of the copies that bf16 kernels make
            assert simulate(fake, decide(fake, plan)).peak_bytes == pytest.approx(peak_bytes, rel=0.005)


@pytest.mark.parametrize("name", ["reference", "llama", "mixtral", "deepseek_v3", "gemma", "gpt2", "bloom", "mamba"])
def test_the_gradients_are_those_of_the_model(name: str) -> None:
    """Plans with chunks against the same chunks without recompute bit for bit; those against the model but for order."""
    model = reference(vocab_size=64) if name == "reference" else ZOO[name].model()
    batch = batch_of(model, 64, 12) if name == "reference" else ZOO[name].data()
    expected = gradients(model, batch)
    profile = recollect.record(model, batch, loss_chunks=3, **LEAN_LOOP)
    keep_all, full = recollect.classic_plan(profile, "keep_all"), recollect.classic_plan(profile, "full")
    with recollect.apply(model, keep_all):
        chunked = gradients(model, batch)
    with recollect.apply(model, full):
        assert_same_gradients(chunked, gradients(model, batch))
    assert_close(expected, chunked)
    assert_same_gradients(expected, gradients(model, batch))


def test_the_number_of_items_and_the_other_losses_count() -> None:
    model = hugging_face("Mixtral", num_local_experts=4, output_router_logits=True)
    batch = {**batch_of(model, 64, 12), "num_items_in_batch": torch.tensor(17)}
    output = model(**batch)
    assert output.aux_loss
    expected = gradients(model, batch)
    with recollect.apply(model, IN_8):
        assert_close(expected, gradients(model, batch))
        assert torch.equal(model(**batch).aux_loss, output.aux_loss)


def test_logits_are_there_without_labels_without_gradients_and_afterwards() -> None:
    model = hugging_face()
    batch = batch_of(model, 64, 12)
    own = {name: dict(vars(module)) for name, module in model.named_modules()}
    plain = model(**batch).logits
    applied = recollect.apply(model, IN_8)
    assert recollect.applied_to(model) == [applied]
    assert model(**batch).logits is None
    assert model(**batch, return_dict=False)[1] is None
    assert torch.equal(model(batch["input_ids"]).logits, plain)
    assert torch.equal(model(batch["input_ids"], labels=None).logits, plain)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain)
        generated = model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
    applied.remove()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == own
    assert torch.equal(model(**batch).logits, plain)
    assert torch.equal(generated, model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0))


def test_the_reference_model_says_that_it_has_no_logits() -> None:
    model = reference(vocab_size=64)
    batch = batch_of(model, 64, 12)
    expected = gradients(model, batch)
    with recollect.apply(model, IN_8) as applied:
        assert recollect.applied_to(model) == [applied]
        assert model.loss_chunks == 8
        assert model(**batch).logits is None
        assert model(batch["tokens"]).logits is not None
        assert_close(expected, gradients(model, batch))
    assert model.loss_chunks == 1
    assert "forward" not in vars(model)
    assert_same_gradients(expected, gradients(model, batch))


def _adapter(model: Any) -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model.lm_head = Adapted(32, 64, bias=False)


def _own_forward(model: Any) -> None:
    model.lm_head.forward = lambda x: x


def _own_loss(model: Any) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.log_softmax(-1).mean()


def _other_logits(model: Any) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **_: labels.float().mean() * model.lm_head.weight.sum()


def _other_head(model: Any) -> None:
    head = nn.Linear(32, 64)
    model.get_output_embeddings = lambda: head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_adapter, r"its head is a .*Adapted, expected a plain torch.nn.Linear: an adapter on it"),
        (_own_forward, "its head has its own `forward` on the instance"),
        (lambda model: model.lm_head.register_forward_hook(lambda *_: None), "its head Linear has hooks"),
        (_own_loss, "calls log_softmax on the logits, expected a cast"),
        (_other_logits, "does not give cross_entropy the logits, though there are labels"),
        (_other_head, "does not call its output embedding"),
    ],
)
def test_what_cannot_be_intercepted_is_an_error(change: Callable[[Any], Any], message: str) -> None:
    model = hugging_face()
    change(model)
    batch = batch_of(model, 64, 12)
    with pytest.raises(ChunkedLossError, match=f"LlamaForCausalLM in 8 chunks: .*{message}.*loss_chunks=1"):
        recollect.record(model, batch, loss_chunks=8)
    with pytest.raises(ChunkedLossError, match=message), recollect.apply(model, IN_8):
        model(**batch)
    assert not recollect.applied_to(model)


def test_models_without_a_head_are_an_error() -> None:
    model = ZOO["resnet"].model()
    with pytest.raises(
        ChunkedLossError, match="ResNet in 8 chunks: found neither .* `loss_chunks`.*chunked_cross_entropy"
    ):
        recollect.apply(model, IN_8)
    with pytest.raises(ChunkedLossError, match="loss_chunks: got 0, expected a whole number, 1 or more"):
        recollect.record(hugging_face(), {}, loss_chunks=0)
    with pytest.raises(ChunkedLossError, match="loss_chunks: got 'many', expected a whole number"):
        recollect.fit(hugging_face(), {}, "60%", loss_chunks="many")  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [hugging_face, lambda: reference(vocab_size=64)], ids=["Hugging Face", "reference"])
def test_twice_is_an_error(build: Callable[[], nn.Module]) -> None:
    model = build()
    with (
        recollect.apply(model, IN_8),
        pytest.raises(AlreadyAppliedError, match="loss in chunks already.*applied.remove"),
    ):
        recollect.apply(model, IN_8)


def test_the_plan_says_so_and_survives_json() -> None:
    model = reference(vocab_size=64)
    profile = recollect.record(model, batch_of(model, 64, 12), loss_chunks=8, fake=True)
    assert recollect.Profile.from_json(profile.to_json()) == profile
    plan = recollect.plan(profile, "100%")
    assert Plan.from_json(plan.to_json()) == plan != recollect.classic_plan(profile, "full")
    assert plan.loss_chunks == 8
    assert "loss                in 8 chunks" in str(plan)
    assert "loss in one piece -> in 8 chunks" in Plan({}).diff(IN_8)
    assert all(point.plan.loss_chunks == 8 for point in recollect.frontier(profile).points)
    old = json.loads(Plan({}).to_json())
    del old["loss_chunks"]
    assert Plan.from_json(json.dumps(old)).loss_chunks == 1
    with pytest.raises(PlanError, match="loss_chunks: got 0, expected 1 or more"):
        Plan({}, loss_chunks=0)
    with pytest.raises(PlanFormatError, match="loss_chunks"):
        Plan.from_json(json.dumps({**old, "loss_chunks": 0}))


@pytest.mark.parametrize("compare", ["step", "units"])
@pytest.mark.parametrize("build", [hugging_face, lambda: reference(vocab_size=64)], ids=["Hugging Face", "reference"])
def test_verify_is_honest(build: Callable[[], nn.Module], compare: Any) -> None:
    model = build()
    batch = batch_of(model, 64, 12)
    plan = recollect.classic_plan(recollect.record(model, batch, loss_chunks=3, **LEAN_LOOP), "full")
    report = recollect.verify(model, batch, plan, compare=compare, time=False)
    assert report.gradients_equal
    assert report.loss_chunks == 3
    if compare == "units":
        assert report.unchunked_difference is None
        return
    assert report.unchunked_difference is not None
    name, off = report.unchunked_difference
    assert name == "the loss" or name in dict(model.named_parameters())
    assert 0 < off < SAME_BUT_FOR_THE_ORDER
    assert f"loss             in 3 chunks: off by {off:.1e} at most, at {name}" in str(report)


def test_verify_sees_a_wrong_chunked_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference(vocab_size=64)
    batch = batch_of(model, 64, 12)
    own = GPTModel._predict

    def wrong(model: GPTModel, *args: Tensor) -> tuple[Tensor | None, Tensor]:
        logits, loss = own(model, *args)
        return logits, loss * (1.25 if model.loss_chunks > 1 else 1)

    monkeypatch.setattr(GPTModel, "_predict", wrong)
    report = recollect.verify(model, batch, Plan({}, loss_chunks=2), time=False)
    assert report.unchunked_difference is not None
    assert report.unchunked_difference[1] == pytest.approx(0.25, rel=1e-3)


def recorder(model: nn.Module, tried: list[int]) -> Callable[[int], recollect.Profile]:
    batch = batch_of(model)

    def record(loss_chunks: int) -> recollect.Profile:
        tried.append(loss_chunks)
        return recollect.record(model, batch, loss_chunks=loss_chunks, fake=True, **LEAN_LOOP)

    return record


def test_auto_takes_as_many_chunks_as_the_budget_needs() -> None:
    model = LARGE["Hugging Face, bf16"]()
    tried: list[int] = []
    record = recorder(model, tried)
    with pytest.raises(BudgetTooSmallError):
        plan_with_chunks(record, "50%", 1)
    planned = plan_with_chunks(record, "50%", "auto")
    assert tried == [1, 1, 4]
    assert planned.plan.loss_chunks == planned.profile.loss_chunks == 4
    assert planned.plan.budget_bytes == planned.plain_peak_bytes // 2
    assert planned.plan.predicted_peak_bytes is not None
    assert planned.plan.predicted_peak_bytes <= planned.plain_peak_bytes // 2


def test_auto_with_a_loss_that_cannot_be_split() -> None:
    model = hugging_face()
    model.loss_function = lambda logits, labels, **_: logits.log_softmax(-1).mean()
    batch = batch_of(model, 64, 12)

    def record(loss_chunks: int) -> recollect.Profile:
        return recollect.record(model, batch, loss_chunks=loss_chunks, fake=True)

    assert plan_with_chunks(record, "100%", "auto").plan.loss_chunks == 1
    with pytest.raises(BudgetTooSmallError) as raised:
        plan_with_chunks(record, "1%", "auto")
    assert isinstance(raised.value.__cause__, ChunkedLossError)


def test_fit_with_chunks_trains_within_the_budget() -> None:
    model = hugging_face(vocab_size=WORDS, hidden_size=64)
    batch = batch_of(model)
    plan = recollect.fit(model, batch, "40MB", loss_chunks="auto", **LEAN_LOOP)
    (applied,) = recollect.applied_to(model)
    assert applied.plan is plan
    assert plan.loss_chunks > 1
    resident = sum(parameter.nbytes for parameter in model.parameters()) + 2 * 2 * 64 * 8
    assert resident + recollect.measure_peak(partial(run_step, model, batch)).peak_growth_bytes <= 40e6


def test_on_the_command_line(tmp_path: Path) -> None:
    sizes = ["--size", "tiny", "--vocab-size", str(WORDS), "--seq-length", "128", "--fake"]
    out = tmp_path / "plan.json"
    assert main(["plan", *sizes, "--memory-budget", "80%", "--loss-chunks", "auto", "--out", str(out)]) == 0
    assert Plan.load(out).loss_chunks in COUNTS
    assert main(["plan", *sizes, "--memory-budget", "100%", "--loss-chunks", "4", "--out", str(out)]) == 0
    assert Plan.load(out).loss_chunks == 4
    assert main(["plan", *sizes, "--memory-budget", "100%", "--loss-chunks", "0", "--out", str(out)]) == 2


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")
def test_replicated_and_sharded(tmp_path: Path) -> None:
    for outcome in run_on_ranks(rank_programs.loss_in_chunks, tmp_path):
        for shape in ("replicated", "sharded"):
            assert_close(outcome[f"{shape} 1"], outcome[f"{shape} 4"])
        assert isinstance(outcome["head of its own 1"], dict)
        error = outcome["head of its own 4"]
        assert "weight is a DTensor of shape [64, 32], expected a whole tensor" in error
        assert "shard it together with the root module" in error
