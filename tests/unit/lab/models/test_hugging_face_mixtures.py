"""Mixtral and DeepSeek-V3: the same logits as Hugging Face's models, with weights taken from there and brought back."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from hugging_face_pairs import SIZES, assert_same_logits, give_weights
from recollect.engine.content import has_same_bits
from recollect.errors import CheckpointError, UnsupportedModelError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.hugging_face import ARCHITECTURES, load_hugging_face, read_config, save_hugging_face
from recollect.lab.models.hugging_face_architecture import WeightRule
from recollect.lab.models.sizes import NAMED_CONFIGS

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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral-heads": ("Mixtral", {**MIXTRAL, "head_dim": 16, "num_experts_per_tok": 3}),
    "mixtral-tied": ("Mixtral", {**MIXTRAL, "tie_word_embeddings": True}),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-one-projection": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False}),
    "deepseek-no-groups": (
        "DeepseekV3",
        {**DEEPSEEK, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def theirs_of(case: str) -> Any:
    """Hugging Face's model with weights large enough for its parts to matter."""
    family, fields = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    give_weights(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    return model


def converted(rules: Iterable[WeightRule], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {rule.ours: rule.read(theirs) for rule in rules if not rule.is_extra}


@every_case
def test_logits_of_a_saved_model(case: str, tmp_path: Path) -> None:
    """transformers writes every expert's matrices on their own."""
    theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path)
    if case.startswith("deepseek"):
        _without_further_layers(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(".experts.3." in name for name in names)
    assert_same_logits(load_hugging_face(tmp_path), theirs)


def _without_further_layers(folder: Path) -> None:
    """transformers writes no weights of multi-token prediction, and says that there is a layer of it."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("num_mtp_layers", None)
    path.write_text(json.dumps({**fields, "num_nextn_predict_layers": 0}))


@every_case
def test_saved_models_are_loaded_by_transformers(case: str, tmp_path: Path) -> None:
    theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path / "first")
    if case.startswith("deepseek"):
        _without_further_layers(tmp_path / "first")
    ours = load_hugging_face(tmp_path / "first")
    save_hugging_face(ours, theirs.config.model_type, tmp_path / "second")
    again, report = type(theirs).from_pretrained(tmp_path / "second", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = again.state_dict()
    assert all(has_same_bits(tensor, state[name]) for name, tensor in theirs.state_dict().items())


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, expected 1e-06"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 4"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, r"frequencies are scaled \('yarn'\), expected 'default'"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6 and topk_group 2, expected twice as many"),
    ],
)
def test_what_no_model_of_ours_does_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ARCHITECTURES["deepseek_v3"].read({**DEEPSEEK, **fields})


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sliding_window is 4096, expected None"):
        ARCHITECTURES["mixtral"].read({**MIXTRAL, "sliding_window": 4096})


def test_what_their_model_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="TransformerConfig.moe_router_pre_softmax: got True, expected False"
    ):
        save_hugging_face(_mixtral(moe_router_pre_softmax=True), "mixtral", tmp_path)
    with pytest.raises(UnsupportedModelError, match="TransformerConfig.moe_layer_freq: got 2, expected 1"):
        save_hugging_face(_mixtral(moe_layer_freq=2), "mixtral", tmp_path)
    assert not list(tmp_path.iterdir())


def _mixtral(**changes: Any) -> GPTModel:
    with torch.device("meta"):
        return GPTModel(dataclasses.replace(NAMED_CONFIGS["mixtral-tiny"], **changes))


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
