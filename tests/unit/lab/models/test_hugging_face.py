"""GPT-2, Llama, Mixtral and DeepSeek-V3: the logits of Hugging Face's models, with weights from there and brought back."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from recollect.engine.content import has_same_bits
from recollect.errors import CheckpointError, UnsupportedModelError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.hugging_face import ARCHITECTURES, load_hugging_face, read_config, save_hugging_face
from recollect.lab.models.hugging_face_architecture import WeightRule
from recollect.lab.models.sizes import NAMED_CONFIGS

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {"vocab_size": SIZES["vocab_size"], "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
MIXTRAL = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
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
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", MIXTRAL),
    "mixtral-heads": ("MixtralForCausalLM", {**MIXTRAL, "head_dim": 16, "num_experts_per_tok": 3}),
    "mixtral-tied": ("MixtralForCausalLM", {**MIXTRAL, "tie_word_embeddings": True}),
    "deepseek": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek-one-projection": ("DeepseekV3ForCausalLM", {**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False}),
    "deepseek-no-groups": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ),
}
CASES = DENSE | MIXTURES


def give_weights(model: nn.Module) -> None:
    """Draw weights that are large enough for each part of a model to matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1 if is_norm else 0))


def tokens_of() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(SIZES["vocab_size"], (2, 24))


def assert_same_logits(ours: nn.Module, theirs: nn.Module) -> None:
    """Logits of size 10 in fp32; sums in another order are off by some roundings of 2^-24 each."""
    with torch.no_grad():
        expected = theirs.eval()(tokens_of()).logits
        torch.testing.assert_close(ours.eval()(tokens_of()).logits, expected, rtol=1e-4, atol=1e-4)


def theirs_of(case: str, folder: Path | None = None) -> Any:
    """Hugging Face's model with weights large enough for its parts to matter, and saved in a folder."""
    family, fields = CASES[case]
    torch.manual_seed(0)
    model_class = getattr(transformers, family)
    model = model_class(model_class.config_class(**fields, attn_implementation="eager")).eval()
    give_weights(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    if folder is not None:
        model.save_pretrained(folder)
        _without_further_layers(folder)
    return model


def _without_further_layers(folder: Path) -> None:
    """transformers writes no weights of multi-token prediction, and says that there is a layer of it."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    if fields["model_type"] == "deepseek_v3":
        fields.pop("num_mtp_layers", None)
        path.write_text(json.dumps({**fields, "num_nextn_predict_layers": 0}))


def converted(rules: Iterable[WeightRule], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {rule.ours: rule.read(theirs) for rule in rules if not rule.is_extra}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_saved_model(case: str, tmp_path: Path) -> None:
    """transformers writes every expert's matrices on their own."""
    theirs = theirs_of(case, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(".experts.3." in name for name in names) == (case in MIXTURES)
    assert_same_logits(load_hugging_face(tmp_path), theirs)


# In one file, and of each family one in several.
SAVED = [*((case, 5_000_000_000) for case in CASES), ("gpt2-untied", 20_000), ("llama-biased", 20_000)]


@pytest.mark.parametrize(("case", "shard_bytes"), SAVED)
def test_saved_models_are_loaded_by_transformers(case: str, shard_bytes: int, tmp_path: Path) -> None:
    """Every weight with the same bits, and the configuration with the same logits."""
    theirs = theirs_of(case, tmp_path / "first")
    ours = load_hugging_face(tmp_path / "first")
    save_hugging_face(ours, theirs.config.model_type, tmp_path / "second", shard_bytes=shard_bytes)
    assert (len(list((tmp_path / "second").glob("*.safetensors"))) == 1) == (shard_bytes > 1e9)
    again, report = type(theirs).from_pretrained(tmp_path / "second", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = again.state_dict()
    assert all(has_same_bits(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    if case in DENSE:
        assert_same_logits(again, theirs)


@pytest.mark.parametrize("case", ["gpt2", "qwen3"])
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
        ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish', expected one of gelu,"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.1}, "embd_pdrop is 0.1, expected 0.2"),
        ("llama", {"hidden_act": "mish"}, "hidden_act is 'mish', expected one of gelu,"),
        ("llama", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("llama", {"mlp_bias": True, "attention_bias": False}, "attention_bias is False, expected True"),
        ("llama", {"sliding_window": 4096}, "sliding_window is 4096, expected None"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "the rotary frequencies are scaled ('llama3'), expected 'default'",
        ),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, expected 1e-06"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 4"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", "factor": 40}},
            "frequencies are scaled ('yarn'), expected 'default'",
        ),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 6},
            "num_experts_per_tok is 6 and topk_group 2, expected twice as many",
        ),
        ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096, expected None"),
    ],
)
def test_what_no_model_of_ours_does_is_refused(architecture: str, fields: dict[str, Any], message: str) -> None:
    own = {"deepseek_v3": DEEPSEEK, "mixtral": MIXTRAL}.get(architecture, {})
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        ARCHITECTURES[architecture].read({**own, **fields})


@pytest.mark.parametrize(
    ("architecture", "name", "changes", "message"),
    [
        ("gpt2", "gpt2", {"normalization": "RMSNorm"}, "normalization: got 'RMSNorm', expected 'LayerNorm'"),
        ("gpt2", "gpt2", {"num_query_groups": 4}, "num_query_groups: got 4, expected 12"),
        ("gpt2", "7b", {}, "position_embedding_type: got 'rope', expected 'learned_absolute'"),
        ("llama", "7b", {"add_qkv_bias": True}, "add_qkv_bias: got True, expected False"),
        ("llama", "7b", {"rotary_interleaved": True}, "rotary_interleaved: got True, expected False"),
        ("llama", "mixtral-8x7b", {}, "num_moe_experts: got 8, expected None"),
        (
            "mixtral",
            "mixtral-tiny",
            {"moe_router_pre_softmax": True},
            "moe_router_pre_softmax: got True, expected False",
        ),
        ("mixtral", "mixtral-tiny", {"moe_layer_freq": 2}, "moe_layer_freq: got 2, expected 1"),
    ],
)
def test_what_their_model_cannot_be_is_refused(
    architecture: str, name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = GPTModel(dataclasses.replace(NAMED_CONFIGS[name], **changes))
    with pytest.raises(UnsupportedModelError, match=re.escape(f"TransformerConfig.{message}")):
        save_hugging_face(model, architecture, tmp_path)
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("name", ["mixtral-tiny", "deepseek-v3-tiny"])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 300_000])
def test_round_trip(name: str, shard_bytes: int, tmp_path: Path) -> None:
    """Multi-token prediction and biases included, in one file or several."""
    model = GPTModel(NAMED_CONFIGS[name])
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    save_hugging_face(model, "mixtral" if name == "mixtral-tiny" else "deepseek_v3", tmp_path, shard_bytes=shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 if shard_bytes > 1e9 else len(list(tmp_path.glob("*"))) > 8
    again = load_hugging_face(tmp_path)
    state = again.state_dict()
    assert all(has_same_bits(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_multi_token_prediction_is_that_of_transformers(tmp_path: Path) -> None:
    """Its layer, written as `model.layers.<num_hidden_layers>`, gives the same hidden states in both."""
    theirs = theirs_of("deepseek")
    config = ARCHITECTURES["deepseek_v3"].read({**theirs.config.to_dict(), "num_nextn_predict_layers": 1})
    ours = GPTModel(config)
    give_weights(ours)
    save_hugging_face(ours, "deepseek_v3", tmp_path)
    layer = MtpLayer(
        theirs.config, modeling_deepseek_v3.DeepseekV3DecoderLayer, modeling_deepseek_v3.DeepseekV3RMSNorm, 3
    )
    _fill(layer, load_file(tmp_path / "model.safetensors"), "model.layers.3.")
    x, embedded = torch.randn(2, 2, 24, 32)
    outputs, _ = ours.mtp(x, [embedded], ours.rotary_pos_emb(x))
    positions = torch.arange(24).unsqueeze(0)
    angles = theirs.model.rotary_emb(x, positions)
    mask = torch.full((24, 24), -torch.inf).triu(1).expand(1, 1, 24, 24)
    expected = layer(embedded, x, angles, mask, positions, None)
    torch.testing.assert_close(outputs[0], expected, rtol=1e-4, atol=1e-4)


def _fill(layer: nn.Module, tensors: dict[str, Tensor], prefix: str) -> None:
    """Give a layer of theirs the weights that stand in a file, experts stacked."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    assert found.pop("embed_tokens.weight").shape == found.pop("shared_head.head.weight").shape == (96, 32)
    state = {"post_norm.weight": found.pop("shared_head.norm.weight")}
    state |= {name: found.pop(name) for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}

    def stacked(part: str) -> Tensor:
        return torch.stack([found.pop(f"mlp.experts.{expert}.{part}.weight") for expert in range(8)])

    gate_and_up = torch.cat((stacked("gate_proj"), stacked("up_proj")), dim=1)
    found |= {"mlp.experts.gate_up_proj": gate_and_up, "mlp.experts.down_proj": stacked("down_proj")}
    layer.load_state_dict({**state, **{f"mtp_block.{name}": tensor for name, tensor in found.items()}})


def test_folders_that_hold_no_such_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"config.json: cannot be read .*expected the folder of a Hugging Face model"
    ):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModelError, match="model_type is 'mamba', expected one of .*mixtral"):
        load_hugging_face(tmp_path)
    quantized = {"model_type": "mixtral", **MIXTRAL, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(UnsupportedModelError, match="the weights are quantized .*Convert them to bf16 first"):
        load_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **MIXTRAL}))
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read .*expected safetensors"):
        load_hugging_face(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        load_hugging_face(tmp_path)


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    model = GPTModel(ARCHITECTURES["mixtral"].read(MIXTRAL))
    rules = list(ARCHITECTURES["mixtral"].rules(model.config))
    save_hugging_face(model, "mixtral", tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    del theirs["model.norm.weight"]
    with pytest.raises(
        CheckpointError, match="has no 'model.norm.weight', expected it for 'decoder.final_layernorm.weight'"
    ):
        converted(rules, theirs)
    del theirs["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(CheckpointError, match=r"has no 'model.layers.0.block_sparse_moe.experts.2.w3.weight'"):
        converted(rules, theirs)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 100}))
    with pytest.raises(CheckpointError, match=r"has shape \[96, 32\], expected \[100, 32\] by its config.json"):
        load_hugging_face(tmp_path)
