"""The command line itself: help, flags, one clear line for an error."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recollect import __version__
from recollect.cli import main
from recollect.cli.commands import Train
from recollect.cli.entry import parse_train
from recollect.errors import DataError
from training_runs import start_python, write_text

pytestmark = pytest.mark.integration


COMMANDS = ("train", "plan", "frontier", "calibrate", "tokenize", "bench", "explain", "doctor")


@pytest.mark.parametrize("args", [[], *([command] for command in COMMANDS)])
def test_help_imports_no_torch(args: list[str]) -> None:
    # Not a time limit, which a busy machine breaks: torch is what takes the seconds.
    code = (
        "import sys\n"
        "from recollect.cli import main\n"
        "try:\n"
        f"    main({[*args, '--help']!r})\n"
        "except SystemExit as end:\n"
        "    sys.exit(end.code or 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"usage: recollect {' '.join(args)}".strip() in done.stdout


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="needs a system with SIGPIPE")
def test_help_that_nobody_reads_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m recollect.cli train --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_help_of_train_begins_with_what_matters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    first, _, rest = capsys.readouterr().out.partition("All flags, in groups:")
    assert max(map(len, first.splitlines())) <= 80
    named = re.findall(r"^  (--[\w-]+) ", first.partition("the ten flags")[2], re.MULTILINE)
    assert len(named) == 10
    assert all(f" {flag}" in rest for flag in named)
    groups = re.findall(r"^\W+ ([\w. ]+) options \W+$", rest, re.MULTILINE)
    assert groups[:7] == ["model", "experts", "latent attention", "fp8", "data", "optimizer", "step"]
    assert groups[7:] == ["run", "processes", "profiler", "recompute", "offload"]
    examples = re.findall(r"^  recollect train (.+)", first.replace("\\\n", " "), re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        assert parse_train(shlex.split(example.partition("(")[0])) != Train()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_what_a_flag_takes_and_none_is_understood(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert "{None" not in text and "|INT" not in text.replace("{auto}|INT", "")


def test_none_is_a_value_and_choices_have_the_order_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    flags = parse_train(["--size", "None", "--num-layers", "None", "--recompute-granularity", "None"])
    assert flags == Train()
    assert parse_train(["--num-layers", "3"]).config.model.num_layers == 3
    with pytest.raises(SystemExit):
        main(["train", "--size", "foo"])
    assert "('demo', 'tiny', 'gpt-tiny'," in " ".join(capsys.readouterr().err.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"recollect {__version__}\n"


def test_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "recollect", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"recollect {__version__}\n"


@pytest.mark.parametrize(("word", "meant"), [("tarin", " Did you mean recollect train?"), ("xyz", "")])
def test_a_command_that_there_is_not(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    said = f"Error: recollect {word}: no such command, expected one of {', '.join(COMMANDS)}.{meant}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_help_lists_the_commands(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert all(name in output for name in COMMANDS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--stepz", "3"], "Unrecognized options: --stepz"),
        (["train", "--steps", "0"], "steps: got 0, expected at least 1"),
        (["train", "--resume"], "resume: got it without --run-dir, expected the folder of the run"),
        (["train", "--hidden-size", "30"], "TransformerConfig.hidden_size: got 30"),
        (["plan"], "--memory-budget"),
        (["plan", "--memory-budget", "1GiB", "--seq-length", "0"], "seq_length: got 0, expected at least 1"),
    ],
)
def test_flags_that_do_not_parse(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    output = capsys.readouterr().err
    assert message in " ".join(output.replace("│", " ").split())
    assert "tyro" not in output


@pytest.mark.parametrize(
    ("args", "package", "extra"),
    [
        (["plan", "--memory-budget", "1GiB", "--hf-config", "none.json"], "transformers", "hf"),
        (["tokenize", "--tokenizer", "{folder}/file", "--output-prefix", "{folder}/out"], "tokenizers", "train"),
        (
            [
                "train",
                "--size",
                "tiny",
                "--steps",
                "1",
                "--device",
                "cpu",
                "--tensorboard",
                "--run-dir",
                "{folder}/run",
            ],
            "torch.utils.tensorboard",
            "train",
        ),
    ],
)
def test_missing_packages_are_named_with_their_command(
    args: list[str],
    package: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "file").touch()
    assert main([arg.format(folder=tmp_path) for arg in args]) == 2
    assert f"Run: pip install 'recollect[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "problem"), [("none/hardware.json", "no folder {folder}/none"), (".", "Is a directory")]
)
@pytest.mark.parametrize("command", [["calibrate"], ["plan", "--hf-config", "none.json", "--memory-budget", "60%"]])
def test_output_files_are_checked_first(
    command: list[str], out: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Measuring takes a minute, and the config does not exist.
    assert main([*command, "--out", str(tmp_path / out)]) == 2
    assert capsys.readouterr().err == (
        f"Error: --out {tmp_path / out}: cannot be written ({problem.format(folder=tmp_path)}), expected a file in a "
        "writable folder.\n"
    )


def test_error_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["train", "--data", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run")]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error == (
        f"Error: training data {tmp_path / 'none'}: no such file or folder, expected a text file, a .jsonl file or a "
        "folder. Check --data.\n"
    )


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        main(["train", "--data", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run"), "--debug"])


def test_train_from_the_command_line_prints_the_report(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG\x00")
    flags = ["--size", "tiny", "--seq-length", 32, "--batch-size", 2, "--steps", 3, "--device", "cpu"]
    process = start_python("train", "--data", text, tmp_path / "folder", *flags, "--run-dir", tmp_path / "run")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "Warning: training data" in errors  # the picture
    assert "step 3/3  loss" in output
    assert "Planned, predicted, measured" in output
    assert f"Metrics, plan and checkpoints are in {tmp_path / 'run'}." in output
