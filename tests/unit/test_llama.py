"""The reference decoder: published sizes, agreement with Hugging Face's Llama, causality, loss."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from recollect.models.llama import SIZES, Llama, LlamaConfig

PUBLISHED = {  # parameter counts of the model cards
    "160m": 162_417_408,
    "1b": 1_100_048_384,
    "7b": 6_738_415_616,
    "8b": 8_030_261_248,
    "13b": 13_015_864_320,
    "70b": 68_976_648_192,
}


def tiny(**changes: object) -> LlamaConfig:
    return dataclasses.replace(SIZES["tiny"], **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_published_sizes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert SIZES[name].num_parameters == count
    with torch.device("meta"):
        assert Llama(SIZES[name]).num_parameters == count


def test_tied_matrix_counts_once() -> None:
    config = tiny(tie_embeddings=True)
    model = Llama(config)
    assert model.num_parameters == config.num_parameters == tiny().num_parameters - 256 * 64
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_equal_those_of_hugging_face(kv_heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = tiny(num_kv_heads=kv_heads)
    model = Llama(config)
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
        )
    )
    theirs = {name.removeprefix("model."): weight for name, weight in other.state_dict().items()}
    model.load_state_dict(theirs)  # strict: every name is Hugging Face's
    tokens = torch.randint(256, (2, 33))
    # fp32 with another order of sums: 1e-5 is about 100 ulp of logits of size 1
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits, atol=1e-5, rtol=1e-5)


def test_a_position_does_not_see_later_ones() -> None:
    torch.manual_seed(0)
    model = Llama(tiny())
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_loss_is_fp32_ignores_minus_100_and_starts_near_uniform() -> None:
    torch.manual_seed(0)
    model = Llama(tiny(), compute_dtype=torch.bfloat16)
    tokens = torch.randint(256, (2, 64))
    out = model(tokens, labels=tokens)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    assert abs(out.loss.item() - torch.log(torch.tensor(256.0)).item()) < 0.1  # GPT-like init: logits near zero
    half = tokens.clone()
    half[:, 32:] = -100
    expected = torch.nn.functional.cross_entropy(out.logits.float()[:, :32].flatten(0, 1), tokens[:, :32].flatten())
    assert torch.equal(model(tokens, labels=half).loss, expected)


def test_bf16_compute_leaves_weights_and_gradients_in_fp32() -> None:
    model = Llama(tiny(), compute_dtype=torch.bfloat16)
    tokens = torch.randint(256, (1, 8))
    model(tokens, labels=tokens).loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None for p in model.parameters())


def test_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Llama(tiny())
        tokens = torch.zeros(2, 8, dtype=torch.int64)
    out = model(tokens, labels=tokens)
    assert out.logits.shape == (2, 8, 256)
    out.loss.backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "LlamaConfig.num_layers: got 0, expected at least 1"),
        (
            {"hidden_size": 60, "num_heads": 4},
            "LlamaConfig.hidden_size: got 60, expected a multiple of 2 \\* num_heads = 8",
        ),
        ({"num_kv_heads": 3}, "LlamaConfig.num_kv_heads: got 3, expected a divisor of num_heads = 4"),
    ],
)
def test_impossible_dimensions_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_defaults_follow_llama() -> None:
    config = LlamaConfig(vocab_size=64, hidden_size=4096, num_layers=2, num_heads=32)
    assert (config.num_kv_heads, config.intermediate_size) == (32, 10_944)  # 7b has 11,008: a multiple of 256


def test_sizes_import_no_torch() -> None:
    code = "import sys, recollect.models.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
