"""`scripts/gpu`: every part runs at tiny sizes on the CPU, so that nothing is tried for the first time on a GPU."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}
PARTS = (
    "tests calibrate prediction offload fp8 overhead engines-2048 engines-4096 engines-random capture claims".split()
)
PARTS += "frontier-dense frontier-moe frontier-mla frontier-7b compiled".split()


def scripts_gpu(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, **variables},
    )


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def rows_of(out: Path, part: str, metric: str) -> list[dict[str, str]]:
    (path,) = out.glob(f"*-{part}.csv")
    return [row for row in rows(path) if row["metric"] == metric]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("gpu")
    done = scripts_gpu("--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.mark.long
def test_every_part_runs(dry_run: tuple[Path, str]) -> None:
    out, printed = dry_run
    table = printed[printed.rindex("scripts/gpu") :]
    assert [
        line.split()[1:4:2] for line in table.splitlines() if line.startswith("│") and line.split()[1] in PARTS
    ] == [[name, "ok"] for name in PARTS]
    assert printed.rstrip().endswith(f"rows and logs: {out}")
    for name in PARTS:
        assert f"== part {name}: " in (out / f"{name}.log").read_text(encoding="utf-8")
    outcomes = [row["value"].partition(":")[0] for row in rows_of(out, "tests", "outcome")]
    assert set(outcomes) == {"passed", "skipped"} and outcomes.count("passed") > 50
    for part in ("engines-2048", "engines-4096", "engines-random"):
        assert {row["value"] for row in rows_of(out, part, "equal")} == {"1"}
        assert "none" in {row["value"] for row in rows_of(out, part, "why_not")}
        assert any(int(row["value"]) for row in rows_of(out, part, "units_traced"))
    over = [row["value"] for row in rows_of(out, "prediction", "over_budget")]
    assert len(over) >= 16 and set(over) == {"0"}


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_rows_say_where_they_come_from(dry_run: tuple[Path, str], part: str) -> None:
    (path,) = dry_run[0].glob(f"cpu-??????-{part}.csv")
    found = rows(path)
    assert found
    for row in found:
        config = json.loads(row["config"])
        assert config["command"] == f"scripts/gpu {part} --dry-run"
        assert {"python", "torch", "transformers"} <= set(config["versions"])
        assert row["torch"] == torch.__version__
    assert not [row for row in found if row["metric"] in ("failed", "out_of_memory", "left_out")]


@pytest.mark.long
@pytest.mark.usefixtures("benchmarks")
def test_page_shows_every_part(dry_run: tuple[Path, str]) -> None:
    from gpu.page import page

    text = page(dry_run[0])
    for name in PARTS:
        assert text.count(f"## {name}, ") == 1
    assert "| Llama 2k, no optimizer | 5 | 0 |" in text
    assert "| compiled blocks, full |" in text
    for part in ("engines-2048", "engines-4096"):
        table = text[text.index(f"## {part}, ") :]
        assert "| graph / every layer | " in table and "| SAC products | " in table
    assert "| GPT-2, bf16 / graph | 0 of " in text
    assert "| full | " in text[text.index("## frontier-dense") :]
    assert "passed" in text[text.index("## tests") :]


@pytest.mark.usefixtures("benchmarks")
def test_committed_page_is_of_the_committed_rows() -> None:
    from gpu.page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(ROOT / "benchmarks" / "results" / "gpu"), "run: scripts/gpu --page"


@pytest.mark.usefixtures("benchmarks")
def test_every_part_has_a_table() -> None:
    from gpu.page_tables import TABLES
    from gpu.parts import PARTS as parts

    assert {part.name for part in parts} == set(TABLES) == set(PARTS)


@pytest.mark.usefixtures("benchmarks")
def test_page_lists_what_was_not_measured(tmp_path: Path) -> None:
    from gpu.page import page
    from results_csv import Number, append

    numbers = [Number("out_of_memory", "text", "Llama 8k", "OutOfMemoryError: no room")]
    numbers += [Number("left_out", "text", "Llama 4k", "no time")]
    append(tmp_path / "h100-202611-prediction.csv", numbers, {"device": "cpu", "command": "scripts/gpu prediction"})
    text = page(tmp_path)
    assert "- Llama 8k: out of memory: OutOfMemoryError: no room" in text
    assert "- Llama 4k: left out: no time" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_cuda_device_is_said_in_a_sentence() -> None:
    done = scripts_gpu("calibrate")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "finds no CUDA device here. Run it where there is one, or use --dry-run" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu"), "--device cpu: expected cuda, or cuda:N. On a CPU use --dry-run."),
        (("--device", "gpu0"), "--device gpu0: "),
        (("speed",), "no part 'speed'; expected one of tests, calibrate, prediction"),
    ],
)
@pytest.mark.usefixtures("benchmarks")
def test_bad_arguments(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu.command import main

    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("benchmarks")
def test_quick_stands_for_short_parts() -> None:
    from gpu.command import parse

    parts = dict.fromkeys(PARTS, "")
    found = parse(["quick"], parts)
    assert set(found.parts) < set(PARTS)
    assert found.seconds < parse([], parts).seconds
    assert parse(["quick", "--seconds", "7"], parts).seconds == 7


def test_parts_need_no_package_of_the_command_line() -> None:
    """A machine with a GPU has PyTorch and what comes with it, but not what parses flags."""
    modules = [f"gpu.{path.stem}" for path in sorted((ROOT / "benchmarks" / "gpu").glob("*_part.py"))]
    program = f"import sys, importlib; sys.modules['tyro'] = None; [importlib.import_module(m) for m in {modules}]"
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "benchmarks"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
