"""Models with a matrix each for queries, keys, values, gate and up: what torchtitan's policies pick, how layouts split them."""

import json
from pathlib import Path

import pytest
import torch

import recollect
from recollect.cli import main
from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.integrations.torchtitan_settings import torchtitan_plan
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.cluster_step import ClusterStep, RecordedStages, record_stages
from recollect.lab.parallel.layout import DeviceLayout
from recollect.profile.profile import Profile

LAYER = "decoder.layers.1"
CONFIG = llama_config(
    num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, vocab_size=96
)


def recorded(*, separate: bool, device: str = "meta") -> Profile:
    with torch.device(device):
        model = GPTModel(CONFIG.changed(separate_projections=separate))
    tokens = torch.zeros(1, 32, dtype=torch.int64, device=device)
    return recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True, hardware="H100")


def products(profile: Profile) -> dict[str, str]:
    """What torchtitan's policy does to each product of a layer, in order."""
    actions = torchtitan_plan(profile, "selective").units[LAYER].actions
    return {name: str(action) for name, action in actions.items() if name.endswith(".mm")}


def test_every_second_product_is_that_of_torchtitan() -> None:
    """Of wq, wk, wv, wo, w1, w3, w2; where they are fused, the output is recomputed in place of keys, values and gate."""
    assert list(products(recorded(separate=True)).items()) == [
        ("self_attention.linear_qkv.0.mm", "keep"),
        ("self_attention.linear_qkv.1.mm", "recompute"),
        ("self_attention.linear_qkv.2.mm", "keep"),
        ("self_attention.linear_proj.mm", "recompute"),
        ("mlp.linear_fc1.0.mm", "keep"),
        ("mlp.linear_fc1.1.mm", "recompute"),
        ("mlp.linear_fc2.mm", "keep"),
    ]
    assert list(products(recorded(separate=False)).values()) == ["keep", "recompute", "keep", "recompute"]


def test_separate_products_give_what_the_fused_one_gives() -> None:
    tokens = torch.randint(0, 96, (2, 16))
    fused, separate = (GPTModel(CONFIG.changed(separate_projections=apart)) for apart in (False, True))
    state = dict(fused.state_dict())
    for layer in range(2):
        sizes = {"self_attention.linear_qkv": (64, 32, 32), "mlp.linear_fc1": (128, 128)}
        for name, rows in sizes.items():
            whole = state.pop(f"decoder.layers.{layer}.{name}.weight")
            state |= {f"decoder.layers.{layer}.{name}.{n}.weight": part for n, part in enumerate(whole.split(rows))}
    separate.load_state_dict(state)
    losses = [model(tokens=tokens, labels=tokens).loss for model in (fused, separate)]
    torch.testing.assert_close(*losses)  # matrices of another size sum in another order
    assert sum(p.numel() for p in separate.parameters()) == CONFIG.num_parameters


def spread(*, separate: bool, sequence: bool) -> RecordedStages:
    layout = DeviceLayout(tensor_model_parallel_size=2, sequence_parallel=sequence)
    config = CONFIG.changed(separate_projections=separate)
    return record_stages(
        ClusterStep(config=config, layout=layout, cluster=cluster_of(find_hardware("H100")), seq_length=32)
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_layouts_split_separate_projections_alike(sequence: bool) -> None:
    """With as much to hold and to send: the gathered input is that of all of them."""
    fused, separate = (spread(separate=apart, sequence=sequence) for apart in (False, True))
    assert separate.profiles[0].persistent == fused.profiles[0].persistent
    moved = [found.traffic[0]["tensor"] for found in (fused, separate)]
    assert moved[0].nbytes == moved[1].nbytes and moved[0].count == moved[1].count


def test_layouts_take_a_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors")
    config = tmp_path / "llama.json"
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 96, **fields}))
    out = tmp_path / "plan.json"
    flags = ["--hf-config", str(config), "--seq-length", "256", "--fake", "--hardware", "H100", "--out", str(out)]
    assert main(["plan", *flags, "--tensor-model-parallel-size", "2", "--memory-budget", "85%"]) == 0
    assert "2 x NVIDIA H100 SXM: peak" in capsys.readouterr().out
    assert "self_attention.linear_qkv.2.mm" in recollect.Plan.load(out).units[LAYER].actions


def test_torchtitan_s_settings_are_chosen_for_separate_projections(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    flags = ["--size", "llama-tiny", "--seq-length", "256", "--fake", "--write", "torchtitan", "--out", str(out)]
    assert main(["plan", *flags, "--memory-budget", "85%"]) == 0
    assert "mlp.linear_fc1.1.mm" in recollect.Plan.load(out).units[LAYER].actions


def test_a_matrix_that_stands_alone_is_no_list() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=96, separate_projections=True
    )
    assert "decoder.layers.0.mlp.linear_fc1.weight" in GPTModel(config).state_dict()
