"""Results of the harness: as JSON, against golden ones, as tables."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recollect.errors import BenchError
from recollect.lab.bench.report import as_csv, as_markdown, notes, result_table
from recollect.lab.bench.results import BenchResults, Row, check_comparable, compared

GOLDEN = Path("golden.json")
PLAIN = Row(
    name="none",
    fields={"recompute_granularity": None},
    predicted_peak_bytes=1000,
    predicted_slowdown=0.0,
    peak_bytes=1000,
    step_s=2.0,
    step_p20_s=1.9,
    step_p80_s=2.1,
    slowdown=0.0,
    slowdown_p20=0.0,
    slowdown_p80=0.0,
    model_flops=4e12,
    hardware_flops=5e12,
    num_tokens=1024,
)
MLP = replace(
    PLAIN, name="selective mlp", fields={"recompute_modules": ("mlp",)}, step_s=2.5, slowdown=0.25, peak_bytes=600
)
RESULTS = BenchResults(
    workload={"model": "GPTModel", "config": {"hidden_size": 64, "num_layers": 2}},
    machine={"device": "cpu of a kind", "threads": 1},
    versions={"torch": "2.13.0"},
    rounds=8,
    reference="none",
    rows=(PLAIN, MLP),
)

HERE: dict[str, Any] = {name: getattr(RESULTS, name) for name in ("workload", "machine", "versions")}


def against(*rows: Row, golden: BenchResults = RESULTS, threshold: float = 0.05) -> BenchResults:
    return compared(replace(RESULTS, rows=rows), golden, path=GOLDEN, threshold=threshold)


def test_round_trip() -> None:
    back = BenchResults.from_json(RESULTS.to_json())
    assert back.to_json() == RESULTS.to_json()
    assert back.rows[0] == PLAIN
    assert back.rows[0].tflops == 2.0
    assert back.rows[0].hardware_tflops == 2.5
    assert back.rows[0].tokens_per_s == 512


@pytest.mark.parametrize(
    ("factor", "result"), [(1.0, "ok"), (1.04, "ok"), (1.06, "perf regression"), (0.97, "ok"), (0.94, "faster")]
)
def test_times_within_and_beyond_the_threshold(factor: float, result: str) -> None:
    found = against(replace(PLAIN, step_s=2.0 * factor))
    assert found.rows[0].result == result
    assert found.has_regression == (result == "perf regression")
    assert found.rows[0].versus_golden == pytest.approx(1 / factor - 1)


def test_a_larger_peak_is_a_regression() -> None:
    found = against(replace(PLAIN, peak_bytes=1060))
    assert found.rows[0].result == "memory regression"
    assert found.has_regression
    assert not against(replace(PLAIN, peak_bytes=1040)).has_regression


def test_out_of_memory_is_a_regression_where_it_was_not_before() -> None:
    gone = replace(PLAIN, result="OOM", step_s=None, peak_bytes=None, versus_golden=None)
    assert against(gone).has_regression
    golden = replace(RESULTS, rows=(gone, MLP))
    assert not against(gone, MLP, golden=golden).has_regression
    found = against(PLAIN, MLP, golden=golden)
    assert found.rows[0].note == "did not fit when the golden results were measured"
    assert not found.has_regression


def test_a_new_setting_is_compared_with_the_golden_reference() -> None:
    # As the experiments of Bridge's recipes are, each with the one golden value.
    found = against(replace(MLP, name="selective mlp,core_attn", peak_bytes=9000))
    assert found.rows[0].result == "perf regression"
    assert found.rows[0].golden_name == "none"
    assert "-20.0 % (of none)" in as_markdown(found)
    with pytest.raises(BenchError, match="no times for 'full' nor for the reference"):
        against(replace(MLP, name="full"), golden=replace(RESULTS, rows=(MLP,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"workload": {"model": "GPTModel", "config": {"hidden_size": 65, "num_layers": 2}}},
            "config.hidden_size: stored 64",
        ),
        (
            {"machine": {"device": "another", "threads": 1}},
            "another machine .device: stored cpu of a kind, now another",
        ),
        ({"machine": {"device": "cpu of a kind"}}, "threads: stored 1, now nothing"),
    ],
)
def test_results_of_another_step_or_machine_are_refused(change: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(BenchError, match=message) as caught:
        check_comparable(RESULTS, GOLDEN, **{**HERE, **change})
    assert "golden results golden.json: from another" in str(caught.value)
    check_comparable(RESULTS, GOLDEN, **HERE)


def test_other_versions_are_compared_with_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"other versions \(torch: stored 2.13.0, now 2.14.0\), which may explain differences"
    ):
        check_comparable(RESULTS, GOLDEN, **{**HERE, "versions": {"torch": "2.14.0"}})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "recollect.plan", "format: got .recollect.plan., expected 'recollect.bench'"),
        ("version", 2, "this recollect reads up to 1"),
        ("reference", 7, "reference: got 7, expected a string"),
        ("rows", {}, "rows: got {}, expected an array"),
        ("extra", 1, "extra: unknown key"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({**json.loads(RESULTS.to_json()), key: value}))
    with pytest.raises(BenchError, match=message) as caught:
        BenchResults.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("result", "fine", r"\.result: got .fine., expected .ok. or .faster."),
        ("step_s", 0, r": step_s: got 0\.0, expected a number of seconds above 0"),
        ("peak_bytes", -1, r"\.peak_bytes: got -1, expected an integer, 0 or more"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    document = json.loads(RESULTS.to_json())
    document["rows"][1][key] = value
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BenchError, match=rf"rows\[1\]{message}"):
        BenchResults.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        BenchError, match=r"none\.json: cannot be read \(No such file or directory\), expected a file written by"
    ):
        BenchResults.load(tmp_path / "none.json")


def test_tables_have_every_setting_and_say_what_does_not_apply() -> None:
    oom = replace(
        PLAIN, name="full", result="OOM (predicted)", note="predicted above the limit", step_s=None, peak_bytes=None
    )
    results = replace(RESULTS, rows=(PLAIN, MLP, oom), memory_limit_bytes=2**30)
    text = as_markdown(results)
    assert "| none | 2 | 2.5 | 2.00 s | 1.90 s..2.10 s | 512 | - | - | - | 1000 B | 1000 B | - | ok |" in text
    assert "OOM (predicted)" in text
    assert "reserved: not applicable on a CPU" in text
    assert "Peaks above 1.0 GiB (--memory-limit) count as OOM." in text
    assert "full: predicted above the limit." in text
    assert not any("reserved" in note for note in notes(replace(RESULTS, rows=(replace(PLAIN, reserved_bytes=2048),))))
    lines = as_csv(results).splitlines()
    assert lines[0].startswith("name,result,note,tflops,hardware_tflops")
    assert lines[1].startswith("none,ok,,2.0,2.5,")
    assert len(lines) == 4


@pytest.mark.parametrize("width", [80, 100, 120, 160, 240])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_words(width: int) -> None:
    results = against(PLAIN, replace(MLP, name="selective core_attn,mlp"))
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    console.print(result_table(results, width))
    text = file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "selective core_attn,mlp" in text and "600 B" in text
    assert ("Left out for lack of room: reserved" in text) == (width < 240)
    for word in ("setting", "step", "vs none", "peak mem", "result"):
        assert word in text
