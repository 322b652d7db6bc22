"""`enable_memory_budget` and ROLL's switches in bare loops over models of Hugging Face, in place of its checkpointing."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")

import hugging_face_flag  # noqa: E402
import recollect  # noqa: E402
from gradients import assert_same_weights  # noqa: E402
from hugging_face_trainers import VOCABULARY, gpt2, llama, lora  # noqa: E402
from recollect.errors import AlreadyAppliedError, ArgumentError, ConfigError  # noqa: E402
from recollect.integrations.megatron import RollCheckpointing  # noqa: E402
from recollect.integrations.roll import apply_roll_checkpointing  # noqa: E402
from recollect.integrations.transformers import enable_memory_budget  # noqa: E402
from tiers import long  # noqa: E402

TOKENS = torch.randint(0, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))


def small_llama() -> Any:
    return llama(num_hidden_layers=2)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model: Any, budget: str | None, num_steps: int = 3) -> tuple[Any, Any, list[int]]:
    """A loop as people write it; returns the model, the handle, and the peak of the later steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    attached = None if budget is None else enable_memory_budget(model.train(), optimizer, budget, log=lambda line: None)
    torch.manual_seed(3)
    step(model.train(), optimizer)
    peaks = [
        recollect.measure_peak(lambda: step(model, optimizer), device="cpu").peak_bytes for _ in range(num_steps - 1)
    ]
    return model, attached, peaks


@pytest.mark.parametrize("new_model", [small_llama, *long([gpt2])], ids=["llama", "gpt2"])
def test_weights_are_as_without_it_and_the_budget_holds(new_model: Any) -> None:
    plain, _, plain_peaks = train(new_model(), None)
    model, attached, peaks = train(new_model(), "70%")
    assert_same_weights(plain, model)
    assert attached.recorded_steps == [0]
    assert max(peaks) <= attached.budget_bytes < min(plain_peaks)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, which calls the old names
def test_adapters() -> None:
    pytest.importorskip("peft", reason="needs peft")
    plain, _, _ = train(lora(small_llama()), None)
    model, attached, _ = train(lora(small_llama()), "80%")
    assert_same_weights(plain, model)
    assert attached.plan is not None
    assert model.base_model.model.config.use_cache is False


def test_the_cache_is_off_until_the_end_and_generate_uses_its_own() -> None:
    model = small_llama().train()
    assert model.config.use_cache is True
    optimizer = torch.optim.AdamW(model.parameters())
    attached = enable_memory_budget(model, optimizer, "70%", log=lambda line: None)
    assert model(input_ids=TOKENS, labels=TOKENS).past_key_values is None
    step(model, optimizer)
    model.eval()
    found = model.generate(
        TOKENS[:1, :8], max_new_tokens=4, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    assert found.past_key_values is not None
    attached.remove()
    assert model.config.use_cache is True
    expected = model.generate(TOKENS[:1, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(found.sequences, expected)


def test_models_that_recompute_by_themselves_are_refused_and_left_alone() -> None:
    model = small_llama().train()
    hugging_face_flag.enable(model)
    optimizer = torch.optim.AdamW(model.parameters())
    own_name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    text = f"Hugging Face's gradient checkpointing; .* call model.{own_name}_checkpointing_disable"
    with pytest.raises(AlreadyAppliedError, match=text):
        enable_memory_budget(model, optimizer, "70%")
    assert model.config.use_cache is True
    hugging_face_flag.disable(model)
    with enable_memory_budget(model, optimizer, "70%", log=lambda line: None):
        step(model, optimizer)
        hugging_face_flag.enable(model)
        with pytest.raises(AlreadyAppliedError, match=text):
            step(model, optimizer)
    assert recollect.applied_to(model) == []


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.integrations.transformers.transformers.__version__", "4.49.0")
    model = llama()
    with pytest.raises(ConfigError, match=r"got transformers='4.49.0'"):
        enable_memory_budget(model, torch.optim.AdamW(model.parameters()), "1GiB")


TWO_ROWS = torch.randint(0, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1))


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(
        **sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=VOCABULARY, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config)


def gradients(model: Any) -> tuple[list[Any], Any]:
    model.train().zero_grad()
    torch.manual_seed(2)
    output = model(input_ids=TWO_ROWS, labels=TWO_ROWS)
    output.loss.backward()
    return [p.grad.clone() for p in model.parameters()], output.past_key_values


def held_bytes(model: Any) -> int:
    measured = recollect.measure_peak(
        lambda: model(input_ids=TWO_ROWS, labels=TWO_ROWS), device="cpu", baseline_bytes=0
    )
    return measured.end_bytes


@pytest.mark.parametrize(("new_model", "use_reentrant"), [(llama, False), (mixtral, True)], ids=["dense", "experts"])
def test_layers_are_recomputed_without_a_cache(new_model: Any, use_reentrant: bool) -> None:
    expected, cache = gradients(new_model())
    assert cache is not None
    model = new_model().train()
    plain_bytes = held_bytes(model)
    with apply_roll_checkpointing(model) as roll:
        assert roll.settings == {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}, "use_cache": False}
        found, cache = gradients(model)
        assert cache is None
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert held_bytes(model) < plain_bytes / 2
    assert recollect.applied_to(model) == [] and model.config.use_cache is True
    assert held_bytes(model) == plain_bytes


def test_each_switch() -> None:
    model = llama()
    with apply_roll_checkpointing(model, RollCheckpointing(disable_gradient_checkpointing=True)) as roll:
        assert roll.settings == {"use_cache": False} and roll.applied is None
        assert recollect.applied_to(model) == [] and model.config.use_cache is False
    chosen = RollCheckpointing(gradient_checkpointing_use_reentrant=True)
    with apply_roll_checkpointing(model, chosen, use_cache=True) as roll:
        assert roll.settings == {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "use_cache": True}
        assert recollect.applied_to(model) == [roll.applied] and model.config.use_cache is True


def test_the_configuration_of_the_text_model_counts() -> None:
    config = llama().config
    both = {"text_config": config.to_dict(), "num_experts": 8}
    assert RollCheckpointing().use_reentrant(both) is False


def test_mistakes() -> None:
    with pytest.raises(ArgumentError, match="got an object of class LlamaConfig as model"):
        apply_roll_checkpointing(llama().config)
    layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)])
    with pytest.raises(ConfigError, match="Sequential has no `config`, which says whether there are experts"):
        apply_roll_checkpointing(layers)
    apply_roll_checkpointing(layers, RollCheckpointing(gradient_checkpointing_use_reentrant=False)).remove()
    model = llama()
    hugging_face_flag.enable(model)
    with pytest.raises(AlreadyAppliedError, match="Hugging Face's gradient checkpointing"):
        apply_roll_checkpointing(model)
    assert model.config.use_cache is True
