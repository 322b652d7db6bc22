"""Products in 8 bits on fake tensors: as the device that a plan is for multiplies, at its rate; and where it has no kernel."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect
from fp8_models import RECIPES
from recollect.cli import main
from recollect.costs.hardware_table import HARDWARE
from recollect.costs.links import cluster_of
from recollect.costs.roofline import Work, seconds
from recollect.errors import HardwareError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.cluster_step import ClusterStep, record_stages
from recollect.lab.parallel.layout import DeviceLayout
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions
from recollect.simulation.simulate import Simulation, simulate

LAYER = "decoder.layers.1"
WIDE = {"hidden_size": 128, "ffn_hidden_size": 256, "num_layers": 2}
TOKENS = 2 * 128


def recorded(size: str, device: str = "meta", **settings: Any) -> Profile:
    """`settings`: of `recollect.record`, and `fields` of the model."""
    config = NAMED_CONFIGS[size].changed(**WIDE, **settings.pop("fields", {}))
    with torch.device(device):
        model, tokens = GPTModel(config, compute_dtype=torch.bfloat16), torch.zeros(2, 128, dtype=torch.int64)
    return recollect.record(model, {"tokens": tokens, "labels": tokens}, **{"fake": True, **settings})


def keep_all(profile: Profile) -> Simulation:
    return simulate(profile, [CallActions()] * len(profile.calls))


def graph_of(profile: Profile, path: str = LAYER) -> UnitGraph:
    return profile.graph_of(next(call for call in profile.calls if call.path == path))


@pytest.mark.parametrize(
    ("recipe", "hardware", "dtype"),
    [
        ("delayed", "L40S", "fp8"),
        ("tensorwise", "B200", "fp8"),
        ("blockwise", "H100", "fp8_blockwise"),
        pytest.param("mxfp8", "B200", "mxfp8", marks=pytest.mark.long),
    ],
)
def test_a_product_takes_what_the_device_takes(recipe: str, hardware: str, dtype: str) -> None:
    device, fields = HARDWARE[hardware], RECIPES[recipe]
    kernel = recorded("llama-tiny", hardware=hardware, fields=fields)
    (product,) = (op for op in graph_of(kernel).ops if op.name.endswith("linear_fc2.fp8._Product"))
    # Two factors in one byte, a result in two; scales are next to nothing.
    traffic_bytes = 256 * (TOKENS + 128) + 2 * 128 * TOKENS
    work = Work("matmul", traffic_bytes, 0, dtype=dtype, flops=2 * TOKENS * 256 * 128, outputs=TOKENS * 128)
    small_ops = 0 if recipe != "mxfp8" else 10 * device.launch_s  # that put scales in the order of Blackwell's kernels
    assert seconds(work, device) <= product.time_s <= 1.01 * seconds(work, device) + 2 * device.launch_s + small_ops
    emulated = recorded("llama-tiny", hardware=hardware, fields={**fields, "fp8_emulated": True})
    (slow,) = (op for op in graph_of(emulated).ops if op.name.endswith("linear_fc2.fp8._Product"))
    assert slow.time_s > product.time_s
    # Both factors in fp32, too.
    assert keep_all(emulated).backward_peak_bytes > keep_all(kernel).backward_peak_bytes


def test_casts_take_a_byte_and_scales_are_counted() -> None:
    narrow, wide = (recorded("llama-tiny", hardware="H100", fields=f) for f in (RECIPES["tensorwise"], {}))
    assert dict(narrow.persistent) == dict(wide.persistent)
    saved = {value.name: value.nbytes for value in graph_of(narrow).values if value.saved}
    name = "mlp.linear_fc2.fp8"
    assert {key: size for key, size in saved.items() if key.startswith(name)} == {
        f"{name}._to_copy": TOKENS * 256,
        f"{name}._to_copy#1": 128 * 256,
        f"{name}.reciprocal": 4,
        f"{name}.reciprocal#1": 4,
    }
    assert "mlp.activation_func.mul" not in saved
    assert "mlp.activation_func.mul" in {value.name for value in graph_of(wide).values if value.saved}


def test_histories_stay_in_fp32_in_a_model_in_16_bits() -> None:
    with torch.device("meta"):
        model = GPTModel(NAMED_CONFIGS["llama-tiny"].changed(**WIDE, **RECIPES["delayed"])).to(torch.bfloat16)
        tokens = torch.zeros(2, 128, dtype=torch.int64)
    profile = recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True)
    assert profile.persistent["buffers"] == 2 * 4 * 3 * 4 * (3 + 1)  # layers, products, roles, bytes, numbers


def test_experts_in_8_bits() -> None:
    fields = {**RECIPES["tensorwise"], "moe_ffn_hidden_size": 64}
    profiles = [
        recorded("mixtral-tiny", hardware="H100", fields={**fields, "fp8_emulated": is_not}) for is_not in (None, True)
    ]
    for linear in ("linear_fc1", "linear_fc2"):
        kernel_s, emulated_s = (
            next(op.time_s for op in graph_of(profile).ops if op.name == f"mlp.experts.{linear}.fp8._Product")
            for profile in profiles
        )
        assert kernel_s < emulated_s


@pytest.mark.parametrize(("recipe", "hardware", "dtype"), [("tensorwise", "A100", "fp8"), ("mxfp8", "H100", "mxfp8")])
def test_a_device_without_a_kernel(recipe: str, hardware: str, dtype: str) -> None:
    message = f"{HARDWARE[hardware].name}: got a matrix product in {dtype}, for which it has no kernel, expected one in"
    with pytest.raises(HardwareError, match=re.escape(message)):
        recorded("llama-tiny", hardware=hardware, fields=RECIPES[recipe])
    recorded("llama-tiny", hardware=hardware, fields={**RECIPES[recipe], "fp8_emulated": True})


def test_experts_of_a_recipe_without_a_grouped_kernel() -> None:
    fields = {**RECIPES["mxfp8"], "moe_ffn_hidden_size": 64}
    with pytest.raises(
        HardwareError, match="fp8_recipe 'mxfp8': got moe_grouped_gemm True, for which there is no kernel"
    ):
        recorded("mixtral-tiny", hardware="B200", fields=fields)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fake_tensors_of_a_cpu_multiply_as_it_does(recipe: str) -> None:
    """What custom Functions saved is released, too, which fake tensors would keep."""
    fake, real = (recorded("llama-tiny", "cpu", fake=is_fake, fields=RECIPES[recipe]) for is_fake in (True, False))
    assert fake.kernels == "cpu"
    assert [value.name for value in graph_of(fake).values] == [value.name for value in graph_of(real).values]
    found, expected = (keep_all(profile) for profile in (fake, real))
    assert found.forward_peak_bytes == pytest.approx(expected.forward_peak_bytes, rel=1e-3)
    assert found.backward_peak_bytes == pytest.approx(expected.backward_peak_bytes, rel=1e-3)


@pytest.mark.long
def test_stages_of_a_cluster() -> None:
    """Of four layers, each a stage, the first two and the last one stay in 16 bits; the third one's ranks cast their parts."""
    fields = {**WIDE, **RECIPES["tensorwise"], "num_layers": 4, "first_last_layers_bf16": True}
    fields["num_layers_at_start_in_bf16"] = 2
    step = ClusterStep(
        config=NAMED_CONFIGS["llama-tiny"].changed(**fields),
        layout=DeviceLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=4, sequence_parallel=True),
        cluster=cluster_of(HARDWARE["H100"]),
        num_micro_batches=4,
        seq_length=128,
    )
    products = [
        sum(op.name.endswith("_Product") for op in graph_of(profile, "decoder.layers.0").ops)
        for profile in record_stages(step).profiles
    ]
    assert products == [0, 0, 4, 0]


PLAN = "plan --size tiny --fake --dtype bf16 --seq-length 64 --fp8-format hybrid --fp8-recipe tensorwise"


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = f" --memory-budget 90% --out {tmp_path / 'plan.json'}"
    assert main(f"{PLAN} --hardware A100{out}".split()) == 2
    assert "Choose a different device or recipe, or emulate it (--fp8-emulated).\n" in capsys.readouterr().err
    assert main(f"{PLAN} --hardware A100 --fp8-emulated{out}".split()) == 0
    assert "predicted peak" in capsys.readouterr().out


@pytest.mark.long
def test_the_largest_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is smaller in 8 bits: ops that cast have fp32 between them, more than the leanest plan saves otherwise."""
    out = f" --hardware H100 --memory-budget 4MiB --loss-chunks 16 --largest micro-batch --out {tmp_path / 'plan.json'}"
    found = []
    for flags in (PLAN, PLAN.partition(" --fp8")[0]):
        assert main(f"{flags}{out}".split()) == 0
        found.append(int(capsys.readouterr().out.rpartition("for micro-batch ")[2].partition(".")[0]))
    assert 0 < found[0] < found[1]
