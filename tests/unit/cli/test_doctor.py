"""`recollect doctor`: its report, its exit statuses, standard input, and the commands and calls that its advice names."""

import inspect
import io
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

import recollect
from recollect.cli import main
from recollect.cli.commands import DrawFrontier, Explain, MakePlan
from recollect.cli.doctor import report
from recollect.doctor.rule import TOPICS, Rule
from recollect.errors import DiagnosisError

ROOT = Path(__file__).parents[3]
GRAPHS = "AssertionError: full recompute is only supported with full iteration CUDA graph.\n"
RULES = [rule for rules in TOPICS.values() for rule in rules]
COMMANDS = {"plan": MakePlan, "frontier": DrawFrontier, "explain": Explain}


def test_a_report_of_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.log"
    log.write_text(GRAPHS)
    assert main(["doctor", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1. Recompute of whole layers clashes with CUDA graphs of single layers.\n   cause  A graph")
    assert "\n   seen   " in out
    assert "\n   do     Recompute modules instead: --recompute-granularity selective" in out
    assert "[certain, ends the run; rule megatron-full-and-graphs;" in out
    assert [line for line in out.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []


def test_a_command_can_be_copied() -> None:
    lines = report(recollect.diagnose(ROOT / "tests/unit/doctor/texts/memory-full.txt")).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("recollect plan"))
    assert lines[start].endswith(" \\")
    command = " ".join(line.strip().removesuffix("\\") for line in lines[start : start + 2])
    assert shlex.split(command)[:3] == ["recollect", "plan", "--hf-config"]
    assert shlex.split(command)[-2:] == ["--memory-budget", "28GiB"]
    assert max(map(len, lines[start : start + 2])) <= 80


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.log"
    log.write_text(GRAPHS)
    assert main(["doctor", "--json", str(log)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["read"] == [f"{log}: a text of 1 line"]
    assert data["findings"][0]["rule"] == "megatron-full-and-graphs"
    assert data["findings"] == [finding.to_data() for finding in recollect.diagnose(log)]


def test_nothing_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.log"
    log.write_text("all went well\n")
    assert main(["doctor", str(log)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"Nothing recognised.\n  {log}: a text of 1 line\nLooked for 1")
    assert "Pass the whole log, with the traceback" in out
    assert main(["doctor", "--json", str(log)]) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "no.log")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err


def test_a_file_that_ends_like_a_flag_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text("{")
    assert main(["doctor", "run.json"]) == 2
    assert capsys.readouterr().err.startswith("Error: run.json: got malformed JSON")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(DiagnosisError, match="cannot be read"):
        main(["doctor", str(tmp_path / "no.log"), "--debug"])


@pytest.mark.parametrize("args", [[], ["-"]])
def test_standard_input(args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(GRAPHS.encode())))
    assert main(["doctor", *args]) == 0
    assert "standard input:1:" in capsys.readouterr().out


def test_no_file_at_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["doctor"]) == 2
    assert "got no file, expected a log, a configuration or a memory snapshot" in capsys.readouterr().err


def filled(rule: Rule) -> tuple[str, ...]:
    names = re.findall(r"(?<!\{)\{(\w+)\}", "".join((rule.problem, rule.cause, *rule.fix)))
    return rule.finding(**{name: {"budget": "71GiB", "length": "4096"}.get(name, "1") for name in names}).fix


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_advice_can_be_followed(rule: Rule) -> None:
    """Commands parse, and calls of the library have its parameters."""
    for text in filled(rule):
        for name, flags in re.findall(r"\brecollect (plan|frontier|explain)\b((?: -?-?[\w.%-]+)*)", text):
            tyro.cli(COMMANDS[name], args=shlex.split(flags))
        for name, arguments in re.findall(r"\brecollect\.(\w+)(?:\(([^()]*)\))?", text):
            function = getattr(recollect, name)
            if arguments:
                call = eval(f"dict_of({arguments})", {"dict_of": lambda *a, **k: (a, k)}, Names())
                inspect.signature(function).bind(*call[0], **call[1])


class Names(dict[str, object]):
    """Gives each name a value."""

    def __missing__(self, name: str) -> object:
        if name == "dict_of":
            raise KeyError(name)
        return name


def test_the_example_of_the_page() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    path, shown = re.findall(r"```sh\nrecollect doctor (\S+)\n```\n\n```\n((?:[^`].*\n)+)```", text)[0]
    printed = report(recollect.diagnose(ROOT / path))
    assert printed.startswith(shown)
