"""The command line itself: help, flags, one clear line for an error."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recollect import __version__
from recollect.cli import main
from recollect.cli.commands import Train
from recollect.cli.entry import parse_train
from recollect.cli.env import environment
from recollect.cli.parsing import in_flags
from recollect.errors import DataError

COMMANDS = "train plan frontier timeline coverage calibrate megatron tokenize bench explain doctor env".split()


def test_help_imports_no_torch() -> None:
    # Not a time limit, which a busy machine breaks: torch is what takes the seconds.
    code = (
        "import sys\n"
        "from recollect.cli import main\n"
        "for words in ([], *([name] for name in sys.argv[1:])):\n"
        "    try:\n"
        "        main([*words, '--help'])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code and 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *COMMANDS], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("", *COMMANDS):
        assert re.search(rf"^ ?usage: recollect {command}", done.stdout, re.MULTILINE), command


def test_help_is_shown_in_an_encoding_without_its_bullets() -> None:
    command = [sys.executable, "-m", "recollect", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "env        Print what a bug report needs" in done.stdout


@pytest.fixture
def help_of(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The help of a command on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([request.param, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("help_of", "number"), [("train", 10), ("plan", 6)], indirect=["help_of"])
def test_help_begins_with_the_flags_that_matter(help_of: str, number: int) -> None:
    first, _, rest = help_of.partition("All flags, in groups:")
    assert max(map(len, first.splitlines())) <= 80
    named = re.findall(r"^  (--[\w-]+) ", first.partition(" flags that matter most:")[2], re.MULTILINE)
    assert len(named) == number
    assert all(f" {flag}" in rest for flag in named)
    assert not re.search(r"^\W --\w.*[^\s,] *\W?\n(?:\W --\w|\W+$)", rest, re.MULTILINE)  # a flag without a word


@pytest.mark.parametrize("help_of", ["plan"], indirect=True)
def test_examples_in_the_help_of_plan_parse(help_of: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    examples = re.findall(r"^  recollect plan (.+)", help_of.replace("\\\n", " "), re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        # The folder is looked at once the flags are understood, and before anything is recorded.
        assert main(["plan", *shlex.split(example), "--out", str(tmp_path / "none" / "plan.json")]) == 2
        assert "cannot be written (no folder" in capsys.readouterr().err


@pytest.mark.parametrize("help_of", ["train"], indirect=True)
def test_help_of_train_has_groups_and_examples(help_of: str) -> None:
    first, _, rest = help_of.partition("All flags, in groups:")
    groups = re.findall(r"^\W+ ([\w. ]+) options \W+$", rest, re.MULTILINE)
    assert groups[:7] == ["model", "experts", "latent attention", "fp8", "data", "optimizer", "step"]
    assert groups[7:] == ["run", "processes", "profiler", "recompute", "offload"]
    examples = re.findall(r"^  recollect train (.+)", first.replace("\\\n", " "), re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        assert parse_train(shlex.split(example.partition("(")[0])) != Train()


@pytest.mark.parametrize("help_of", COMMANDS, indirect=True)
def test_help_shows_what_a_flag_takes_and_not_none(help_of: str) -> None:
    assert "None" not in help_of and "|INT" not in help_of.replace("{auto}|INT", "")
    assert "(default: )" not in help_of and "headings" not in help_of


def test_none_is_a_value_and_choices_have_the_order_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    flags = parse_train(["--size", "None", "--num-layers", "None", "--recompute-granularity", "None"])
    assert flags == Train()
    assert parse_train(["--num-layers", "3"]).config.model.num_layers == 3
    assert main(["train", "--size", "foo"]) == 2
    error = capsys.readouterr().err
    assert "expected one of demo, tiny, gpt-tiny," in error and "None" not in error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"recollect {__version__}\n"


@pytest.mark.parametrize(
    ("word", "meant"),
    [("tarin", " Did you mean recollect train?"), ("--versoin", " Did you mean recollect --version?"), ("--size", "")],
)
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


def test_settings_that_clash_are_named_by_their_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--recompute-granularity", "selective", "--recompute-method", "uniform"]
    assert main(["explain", *flags]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(
        "Error: --recompute-granularity selective, --recompute-method uniform: a method says which "
    )
    assert error.endswith(
        "Leave --recompute-method out, or set --recompute-granularity to 'full'. [selective-has-no-method]"
    )
    path = tmp_path / "config.yaml"
    path.write_text("recompute_granularity: selective\nrecompute_method: uniform\n")
    assert main(["explain", "--yaml", str(path)]) == 2
    assert "got recompute_granularity='selective', recompute_method='uniform': " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "coverage --recompute-method uniform",
            "got no --recompute-granularity, --recompute-method uniform: without a granularity nothing is recomputed. Set "
            "--recompute-granularity to 'full' or 'selective', or leave the others out. [needs-granularity]",
        ),
        (
            "coverage --recompute-granularity selective --recompute-modules",
            "got --recompute-granularity selective, --recompute-modules: an empty list, so nothing is recomputed. Leave out "
            "--recompute-granularity to say so, or --recompute-modules for the default, core_attn. [empty-modules]",
        ),
        ("timeline --device cuda", "--device cuda: without effect with --fake; --hardware says what to model."),
    ],
)
@pytest.mark.filterwarnings("always")
def test_warnings_name_flags(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line.split(), "--fake", "--size", "tiny", "--seq-length", "16"]) == 0
    assert capsys.readouterr().err == f"Warning: {message}\n"


def test_a_path_or_a_call_in_an_error_is_left_as_it_is() -> None:
    error = ValueError("num_layers: got 2, see src/num_layers.py, fit(num_layers=2), a.num_layers() and 'num_layers'.")
    said = in_flags(error, {"num_layers": "--num-layers"}, [])
    assert said == "--num-layers: got 2, see src/num_layers.py, fit(num_layers=2), a.num_layers() and 'num_layers'."


def test_env_prints_what_a_report_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    assert main(["env"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert found["recollect"] == __version__ and found["torch"].startswith(f"{torch.__version__}, CUDA ")
    assert found["CPU"].endswith(f", {torch.get_num_threads()} threads of PyTorch")
    assert "GPU" in found or "GPU 0" in found
    assert {"Python", "OS", "malloc", "numpy"} <= found.keys()
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in [
        text for name, text in environment() if name == "variable"
    ]
    assert not any("secret" in text for _, text in environment())


@pytest.mark.parametrize(
    ("args", "package", "extra"),
    [
        (["plan", "--memory-budget", "1GiB", "--hf-config", "none.json"], "transformers", "hf"),
        (["tokenize", "--tokenizer", "{folder}/file", "--output-prefix", "{folder}/out"], "tokenizers", "train"),
        (
            "train --size tiny --steps 1 --device cpu --tensorboard --run-dir {folder}/run".split(),
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


def test_an_interrupt_while_torch_is_imported_ends_the_process_at_once() -> None:
    code = (
        "import importlib, os, signal\nfrom recollect.cli import main\n"
        "importlib.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT)\nmain(['env'])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        main(["train", "--data", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run"), "--debug"])


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs a device that is always full")
def test_a_full_disk_ends_a_command_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "recollect", "env"], check=False, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr.startswith("Error: the output: cannot be written (No space left on device).\n")
    assert done.returncode


def test_a_terminal_of_unknown_width_is_printed_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["env"]) == 0
    assert f"recollect         {__version__}" in capsys.readouterr().out
