"""ROLL's switches for models of Hugging Face, on real ones, and its rule for `use_reentrant`."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")

import hugging_face_flag  # noqa: E402
import recollect  # noqa: E402
from hugging_face_trainers import VOCABULARY, llama  # noqa: E402
from recollect.errors import AlreadyAppliedError, ArgumentError, ConfigError  # noqa: E402
from recollect.integrations.megatron import RollCheckpointing  # noqa: E402
from recollect.integrations.roll import apply_roll_checkpointing  # noqa: E402

TOKENS = torch.randint(0, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1))


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
    output = model(input_ids=TOKENS, labels=TOKENS)
    output.loss.backward()
    return [p.grad.clone() for p in model.parameters()], output.past_key_values


def held_bytes(model: Any) -> int:
    measured = recollect.measure_peak(lambda: model(input_ids=TOKENS, labels=TOKENS), device="cpu", baseline_bytes=0)
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
