"""GPT-2 and Llama: the same logits as Hugging Face's models, with weights taken from there and brought back."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hugging_face_pairs import SIZES, assert_same_logits, give_weights
from recollect.engine.content import has_same_bits
from recollect.errors import CheckpointError, UnsupportedModelError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.hugging_face import ARCHITECTURES, load_hugging_face, save_hugging_face
from recollect.lab.models.sizes import NAMED_CONFIGS

GPT2: dict[str, Any] = {"vocab_size": SIZES["vocab_size"], "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-untied": ("GPT2LMHeadModel", {**GPT2, "n_inner": 40, "tie_word_embeddings": False}),
    "gpt2-gelu": ("GPT2LMHeadModel", {**GPT2, "activation_function": "gelu", "layer_norm_epsilon": 1e-3}),
    "llama": ("LlamaForCausalLM", SIZES),
    "llama-grouped": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama-tied": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biased": ("LlamaForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 12}),
    "llama-long": ("LlamaForCausalLM", {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
}
every_case = pytest.mark.parametrize("case", CASES)


def theirs_of(case: str) -> Any:
    """Hugging Face's model with weights large enough for its parts to matter."""
    family, fields = CASES[case]
    torch.manual_seed(0)
    model_class = getattr(transformers, family)
    model = model_class(model_class.config_class(**fields, attn_implementation="eager")).eval()
    give_weights(model)
    return model


@every_case
@pytest.mark.parametrize("core", ["fused", "unfused"])
def test_logits_of_a_saved_model(case: str, core: Any, tmp_path: Path) -> None:
    theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path)
    ours = load_hugging_face(tmp_path).eval()
    if core == "unfused":
        copy = GPTModel(dataclasses.replace(ours.config, core_attention=core)).eval()
        copy.load_state_dict(ours.state_dict())
        ours = copy
    assert_same_logits(ours, theirs)


@every_case
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000])
def test_saved_models_are_loaded_by_transformers(case: str, shard_bytes: int, tmp_path: Path) -> None:
    """In one file or in shards; every weight with the same bits, and the configuration with the same logits."""
    theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path / "first")
    ours = load_hugging_face(tmp_path / "first")
    save_hugging_face(ours, theirs.config.model_type, tmp_path / "second", shard_bytes=shard_bytes)
    assert (len(list((tmp_path / "second").glob("*.safetensors"))) == 1) == (shard_bytes > 1e9)
    again, report = type(theirs).from_pretrained(tmp_path / "second", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = again.state_dict()
    assert all(has_same_bits(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    assert_same_logits(again, theirs)


@every_case
def test_shards_of_transformers_are_loaded(case: str, tmp_path: Path) -> None:
    theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_hugging_face(tmp_path / "one").state_dict(), load_hugging_face(tmp_path / "many").state_dict()
    assert all(has_same_bits(tensor, many[name]) for name, tensor in one.items())


def test_files_as_gpt2_was_released_are_loaded(tmp_path: Path) -> None:
    """Without the prefix of the whole model, and with the masks of attention."""
    theirs = theirs_of("gpt2")
    theirs.save_pretrained(tmp_path)
    expected = load_hugging_face(tmp_path).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    released = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    released |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(3)}
    save_file(released, tmp_path / "model.safetensors")
    found = load_hugging_face(tmp_path).state_dict()
    assert all(has_same_bits(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "gpt2",
            {"activation_function": "mish"},
            "activation_function is 'mish', expected one of gelu,",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.1}, "embd_pdrop is 0.1, expected 0.2"),
        ("llama", {"hidden_act": "mish"}, "hidden_act is 'mish', expected one of gelu,"),
        ("llama", {"attention_bias": True}, "attention_bias is True, expected False"),
        (
            "llama",
            {"mlp_bias": True, "attention_bias": False},
            "attention_bias is False, expected True",
        ),
        ("llama", {"sliding_window": 4096}, "sliding_window is 4096, expected None"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "the rotary frequencies are scaled ('llama3'), expected 'default'",
        ),
    ],
)
def test_what_no_model_of_ours_does_is_refused(architecture: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        ARCHITECTURES[architecture].read(fields)


@pytest.mark.parametrize(
    ("architecture", "name", "changes", "message"),
    [
        (
            "gpt2",
            "gpt2",
            {"normalization": "RMSNorm"},
            "normalization: got 'RMSNorm', expected 'LayerNorm'",
        ),
        ("gpt2", "gpt2", {"num_query_groups": 4}, "num_query_groups: got 4, expected 12"),
        ("gpt2", "7b", {}, "position_embedding_type: got 'rope', expected 'learned_absolute'"),
        ("llama", "7b", {"add_qkv_bias": True}, "add_qkv_bias: got True, expected False"),
        ("llama", "7b", {"rotary_interleaved": True}, "rotary_interleaved: got True, expected False"),
        ("llama", "mixtral-8x7b", {}, "num_moe_experts: got 8, expected None"),
    ],
)
def test_what_their_model_cannot_be_is_refused(
    architecture: str, name: str, changes: dict[str, Any], message: str
) -> None:
    config = dataclasses.replace(NAMED_CONFIGS[name], **changes)
    with pytest.raises(UnsupportedModelError, match=re.escape(f"TransformerConfig.{message}")):
        ARCHITECTURES[architecture].write(config)


def test_checkpoints_that_do_not_fit_their_configuration_are_refused(tmp_path: Path) -> None:
    theirs_of("llama-biased").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    without_biases = {**fields, "attention_bias": False, "mlp_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(without_biases))
    message = r"21 of its tensors belong to no part of the model, such as 'model.layers.0.mlp.down_proj.bias'"
    with pytest.raises(CheckpointError, match=message):
        load_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"has no 'model.layers.3.input_layernorm.weight', expected it for"):
        load_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "intermediate_size": 50}))
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight' has shape \[96, 32\], expected \[100, 32\]"):
        load_hugging_face(tmp_path)


def test_broken_indexes_are_refused(tmp_path: Path) -> None:
    theirs_of("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    moved = {**index["weight_map"], "model.norm.weight": files[0]}
    path.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' cannot be read .*expected it there by the index"):
        load_hugging_face(tmp_path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index.json: cannot be read \(KeyError\('weight_map'\)\), expected"):
        load_hugging_face(tmp_path)
    path.write_text(json.dumps(index))
    (tmp_path / files[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{files[1]}: cannot be read .*expected safetensors"):
        load_hugging_face(tmp_path)


def test_a_tied_matrix_stays_one(tmp_path: Path) -> None:
    theirs_of("gpt2").save_pretrained(tmp_path)
    ours = load_hugging_face(tmp_path)
    assert ours.output_layer.weight is ours.embedding.word_embeddings.weight
    assert ours.num_parameters == ours.config.num_parameters
