"""The table of devices and their links to the host, their JSON, and what users get told about wrong names and files."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recollect.costs.hardware import ArithmeticRate, Hardware, HostLink
from recollect.costs.hardware_table import HARDWARE, HOST_LINKS, choose_hardware, find_hardware, hardware_of_device
from recollect.errors import HardwareError
from recollect.profile.profile import Profile
from small_hardware import SMALL
from toy_profile import stack

H100 = HARDWARE["H100"]


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_that_cuda_reports(device_name: str, name: str) -> None:
    assert hardware_of_device(device_name) is HARDWARE[name]
    assert find_hardware(device_name) is HARDWARE[name]


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA H800 PCIe",
        "NVIDIA L40",
        "Tesla V100-SXM2-16GB",
    ],
)
def test_other_cards_are_not_taken_for_those_of_the_table(device_name: str) -> None:
    assert hardware_of_device(device_name) is None


@pytest.mark.parametrize("name", ["h100", "H100", "rtx 4090", "RTX4090", "mi300x", "NVIDIA H100 SXM", "a100-40gb"])
def test_names_in_any_spelling(name: str) -> None:
    assert find_hardware(name) in HARDWARE.values()


def test_default_is_the_own_gpu_if_it_is_known() -> None:
    assert choose_hardware(None, own_device="NVIDIA L40S") is HARDWARE["L40S"]
    assert choose_hardware(None, own_device="Tesla V100-SXM2-16GB") is H100
    assert choose_hardware(None, own_device="") is H100
    assert choose_hardware("B200", own_device="NVIDIA L40S") is HARDWARE["B200"]
    assert choose_hardware(SMALL, own_device="") is SMALL


def test_unknown_name() -> None:
    with pytest.raises(HardwareError) as caught:
        find_hardware("RTX 4080")
    message = str(caught.value)
    assert message.startswith("hardware: got 'RTX 4080', expected one of H100, H100 PCIe, ")
    assert "or a .json file. Did you mean 'RTX 4090'? `recollect calibrate` measures other devices." in message
    with pytest.raises(HardwareError, match=r"MI300X, cpu, or a .json file\. `recollect calibrate`"):
        find_hardware("zzz")


def test_rates_are_dense() -> None:
    """The figures of the data sheets that are given with sparsity are twice these."""
    assert H100.rate("bf16").peak_flops_per_s == pytest.approx(1979e12 / 2, rel=1e-3)
    assert H100.rate("tf32").peak_flops_per_s == pytest.approx(989e12 / 2, rel=1e-3)
    assert H100.rate("fp8").peak_flops_per_s == pytest.approx(3958e12 / 2, rel=1e-3)
    assert HARDWARE["A100"].rate("bf16").peak_flops_per_s == 624e12 / 2
    assert HARDWARE["B200"].rate("bf16").peak_flops_per_s == 4.5e15 / 2
    # With sums in fp32; in fp16 they are twice as fast.
    assert HARDWARE["RTX 4090"].rate("bf16").peak_flops_per_s == pytest.approx(330.3e12 / 2, rel=1e-3)


def test_dtype_without_a_rate_is_as_fast_as_fp32() -> None:
    assert H100.rate("fp64").dtype == "fp32"


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("A100", "fp8"), ("H100", "mxfp8"), ("B200", "fp8_blockwise"), ("L40S", "fp8_blockwise"), ("cpu", "fp8")],
)
def test_eight_bits_without_a_kernel(device: str, dtype: str) -> None:
    known = ", ".join(rate.dtype for rate in HARDWARE[device].rates)
    message = f"{HARDWARE[device].name}: got a matrix product in {dtype}, for which it has no kernel, expected one in {known}."
    with pytest.raises(HardwareError, match=re.escape(message)):
        HARDWARE[device].rate(dtype)


def test_recipes_of_eight_bits_have_one_peak() -> None:
    assert H100.rate("fp8_blockwise").peak_flops_per_s == H100.rate("fp8").peak_flops_per_s
    assert HARDWARE["B200"].rate("mxfp8").peak_flops_per_s == HARDWARE["B200"].rate("fp8").peak_flops_per_s == 4.5e15


@pytest.mark.parametrize("hardware", [*HARDWARE.values(), SMALL], ids=lambda hardware: hardware.name)
def test_json_round_trip(hardware: Hardware, tmp_path: Path) -> None:
    assert Hardware.from_json(hardware.to_json()) == hardware
    path = tmp_path / "hardware.json"
    path.write_text(hardware.to_json(), encoding="utf-8")
    assert find_hardware(path) == find_hardware(str(path)) == hardware


def test_file_without_a_link_to_the_host_is_read() -> None:
    older = json.loads(SMALL.to_json())
    del older["host_link"]
    read = Hardware.from_json(json.dumps(older))
    assert read == replace(SMALL, host_link=None)
    assert json.loads(read.to_json()) == older == {**older, "version": 1}
    assert Hardware.from_json(_edited(host_link=None)) == read


LINK = {"to_host_bytes_per_s": 1e9, "from_host_bytes_per_s": 1e9, "latency_s": 0}


def _edited(**changes: Any) -> str:
    return json.dumps({**json.loads(SMALL.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2: not JSON"),
        (_edited(format="recollect.plan"), "format: got \"recollect.plan\", expected 'recollect.hardware'"),
        (_edited(version=99), "version: got 99, but this recollect reads up to 1"),
        (_edited(launch_s="fast"), 'launch_s: got "fast", expected a finite number'),
        (_edited(launch_s=0), "launch_s: got 0.0, expected a finite number above 0"),
        (_edited(memory_bytes=1.5), "memory_bytes: got 1.5, expected an integer"),
        (_edited(traffic_efficiency=1.2), "traffic_efficiency: got 1.2, expected a fraction above 0, at most 1"),
        (_edited(cache_bytes_per_s=-1), "cache_bytes_per_s: got -1.0, expected a finite number, 0 or more"),
        (_edited(cache_bytes=0), "cache_bytes, cache_bytes_per_s: got one of them, expected both or none"),
        (_edited(device="tpu"), "device: got 'tpu', expected 'cpu' or 'cuda'"),
        (_edited(rates={}), "rates: 'fp32' is missing"),
        (_edited(rates={"fp32": {}}), "rates.fp32: the key 'peak_flops_per_s' is missing"),
        (_edited(rates={"fp32": {"speed": 1}}), "rates.fp32.speed: unknown key"),
        (
            _edited(elements_per_s={"sort": 0}),
            "elements 'sort': elements_per_s: got 0.0, expected a finite number above 0",
        ),
        (_edited(elements_per_s={"sorting": 1e9}), "elements 'sorting': expected one of "),
        (_edited(host_link=25e9), "host_link: got 25000000000.0, expected an object"),
        (_edited(host_link={"latency_s": 0}), "host_link: the key 'to_host_bytes_per_s' is missing"),
        (_edited(host_link={**LINK, "out": 1}), "host_link.out: unknown key, expected one of to_host_bytes_per_s, "),
        (_edited(host_link={**LINK, "latency_s": "0"}), 'host_link.latency_s: got "0", expected a finite number'),
        (
            _edited(host_link={**LINK, "to_host_bytes_per_s": 0}),
            "host_link: to_host_bytes_per_s: got 0.0, expected a finite number above 0",
        ),
        (_edited(colour="red"), "colour: unknown key"),
    ],
)
def test_malformed_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(HardwareError) as caught:
        find_hardware(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_file_that_is_not_there() -> None:
    with pytest.raises(
        HardwareError, match=r"none\.json: cannot be read .*, expected a file that `recollect calibrate`"
    ):
        find_hardware("none.json")


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"rate 'fp32': matmul_efficiency: got 0, expected a fraction above 0"):
        ArithmeticRate("fp32", 1e12, matmul_efficiency=0)
    with pytest.raises(ValueError, match=r"rate 'fp32': half_rate_depth: got -1, expected a finite number, 0 or more"):
        ArithmeticRate("fp32", 1e12, half_rate_depth=-1)
    with pytest.raises(ValueError, match=r"rates: 'bf16' appears twice, expected each once"):
        replace(SMALL, rates=(*SMALL.rates, SMALL.rates[1]))


def test_every_gpu_of_the_table_has_the_link_of_its_data_sheet() -> None:
    names = {link: name for name, link in HOST_LINKS.items()}
    links = {
        name: names[known.host_link] for name, known in HARDWARE.items() if known.host_link and known.device == "cuda"
    }
    pcie_4 = {"A100 40GB", "A100", "A100 80GB PCIe", "L40S", "RTX 4090"}
    assert links.keys() == HARDWARE.keys() - {"cpu"}
    assert {name for name, link in links.items() if link == "PCIe 4"} == pcie_4
    assert {name for name, link in links.items() if link == "NVLink-C2C"} == {"GH200"}


def test_copies_reach_less_than_the_data_sheet_says() -> None:
    data_sheets = {"PCIe 4": 32e9, "PCIe 5": 64e9, "NVLink-C2C": 450e9}
    for name, link in HOST_LINKS.items():
        assert max(link.to_host_bytes_per_s, link.from_host_bytes_per_s) < data_sheets[name]


def test_numbers_have_their_places_in_a_profile() -> None:
    facts: dict[str, Any] = HostLink(1e9, 2e9, 3e-6).profile_fields()
    profile = Profile((), (), stack(1).log, 0.0, **facts)
    assert (profile.to_host_bytes_per_s, profile.from_host_bytes_per_s, profile.host_latency_s) == (1e9, 2e9, 3e-6)


@pytest.mark.parametrize("number", [-1e-6, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("to_host_bytes_per_s", "a finite number above 0"),
        ("from_host_bytes_per_s", "a finite number above 0"),
        ("latency_s", "a finite number, 0 or more"),
    ],
)
def test_links_that_cannot_be(field: str, expected: str, number: float) -> None:
    with pytest.raises(ValueError, match=rf"^host_link: {field}: got {number}, expected {expected}$"):
        HostLink(**{**LINK, field: number})
    with pytest.raises(ValueError, match=r"to_host_bytes_per_s: got 0, expected a finite number above 0$"):
        HostLink(**{**LINK, "to_host_bytes_per_s": 0})
