"""The Python and the commands on every page of the documentation run as they stand there."""

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import transformers

import guide_pages
from asked_cases import AskedCases, asked_cases
from forked_processes import ForkedProcess, run_forked
from guide_pages import DOCS, PREPARED, Command, blocks, commands
from indexed_files import write_dataset
from tiers import long_but
from training_runs import wait_for_steps

ROOT = DOCS.parent
NEEDS = {
    "bugs_of_others.md": ("peft",),
    "hugging_face.md": ("accelerate",),
    "lightning.md": ("lightning",),
    "peft_trl.md": ("trl", "peft"),
    "trainers.md": ("accelerate", "deepspeed"),
}
# test_examples.py runs these.
QUOTED = {"../README.md", "get_started.md"}
# They compile, show what other libraries do wrong, and record many sizes of a batch, all of which other tests do, too.
SLOW = {"compile.md", "bugs_of_others.md", "largest_batch.md"}


@pytest.fixture(scope="module")
def pages() -> Iterator[AskedCases]:
    with asked_cases([ForkedProcess(Path(guide_pages.__file__), has_input=True)]) as found:
        yield found


@pytest.mark.parametrize("page", long_but(set(PREPARED) - SLOW, sorted(set(PREPARED) - QUOTED)))
def test_the_python_of_a_page_runs(page: str, pages: AskedCases) -> None:
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    (row,) = pages[page]
    assert not row["errors"], "\n".join(row["errors"])


def test_no_page_is_left_out() -> None:
    with_python = {path.name for path in DOCS.glob("*.md") if blocks(path.read_text(encoding="utf-8"))}
    assert with_python == set(PREPARED) - {"../README.md"}


def test_blocks_and_commands_are_found() -> None:
    page = "a\n```python\nx = 1\n```\n\n- b\n\n  ```python\n  y = 2\n  ```\n```\nz\n```\n"
    assert blocks(page) == [(3, "x = 1\n"), (9, "y = 2\n")]
    page += "```sh\none --two \\\n    3\nfour  # 5\n```\n\n<!-- not run: needs a GPU -->\n```sh\nsix\n```\n"
    assert [(" ".join(found.words), found.not_run) for found in commands(page)] == [
        ("one --two 3", ""),
        ("four", ""),
        ("six", "needs a GPU"),
    ]


# Why a command is not run here, and what its lines then are. Others than these end by themselves, or when they are asked to.
NOT_RUN = {
    **{"needs a GPU": r"scripts/gpu ", "needs Megatron-LM": r"(recollect plan|torchrun .* -m recollect megatron)\b"},
    "takes minutes": r"(pip install|(\w+=\w+ )?python benchmarks/\w+\.py)\b",
}
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
COMMANDS = {name: commands(path.read_text(encoding="utf-8")) for name, path in PAGES.items()}
# Of the README, which one takes seconds.
COMMANDS["README.md, 8b"] = [command for command in COMMANDS["README.md"] if "8b" in command.words]
QUICK = ("README.md, 8b", "doctor.md", "megatron_flags.md")
# Files that commands read, and what is in them.
LOG = (ROOT / "tests/unit/doctor/texts/memory-fragmented.txt").read_text(encoding="utf-8")
FILES = {
    "train.py": f"print({LOG!r})",
    "train.log": LOG,
    "config.yaml": "recompute_granularity: full\n",
    **{f"books/{number}.txt": "every layer keeps to the budget of memory " * 500 for number in range(40)},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    transformers.LlamaConfig(vocab_size=1000, **sizes).save_pretrained(tmp_path)
    write_dataset(tmp_path, "code", count=2000)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "layer": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return tmp_path


def ended(command: Command, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command; a training without a number of steps is asked to stop after two."""
    program, *words = command.words
    if program == "torchrun":
        return run_forked("torch.distributed.run", *words, cwd=folder)
    if program != "recollect":
        shell = command.line.replace("python ", f"{sys.executable} ", 1)
        return subprocess.run(shell, shell=True, cwd=folder, capture_output=True, text=True, check=False)
    if words[0] != "train" or "--steps" in words:
        return run_forked("recollect", *words, cwd=folder)
    run_dir = folder / "run"
    process = ForkedProcess("recollect", *words, "--run-dir", run_dir, cwd=folder)
    wait_for_steps(process, run_dir, 2)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    shutil.rmtree(run_dir)
    return subprocess.CompletedProcess(command.words, process.returncode, output, errors)


@pytest.mark.parametrize("page", long_but(QUICK, (page for page, found in COMMANDS.items() if found)))
def test_the_commands_of_a_page_run(page: str, folder: Path) -> None:
    """One after the other, as a later one may read what an earlier one has written."""
    for command in COMMANDS[page]:
        if not command.not_run and command.words[0] != "pip":
            done = ended(command, folder)
            # After a regression against golden results, which the page shows, the status is 1.
            expected = (0, 1) if "--golden" in command.words else (0,)
            assert done.returncode in expected, (command.line, done.stdout[-2000:], done.stderr[-2000:])


def test_a_command_that_is_not_run_says_why() -> None:
    reasons = Counter(command.not_run for page in PAGES for command in COMMANDS[page])
    assert reasons.pop("") > 45 and reasons == {"takes minutes": 7, "needs a GPU": 2, "needs Megatron-LM": 4}
    for command in (command for found in COMMANDS.values() for command in found if command.not_run):
        assert re.match(NOT_RUN[command.not_run], command.line), command


def test_every_command_is_in_a_block_of_a_shell() -> None:
    indented = re.compile(r"^ {4}\$? ?(recollect [a-z]+ -|torchrun |python \S+\.py|pip install )", re.MULTILINE)
    texts = {page: path.read_text(encoding="utf-8") for page, path in PAGES.items() if page != "log.md"}
    assert [page for page, text in texts.items() if indented.search(text)] == []
    # A program that is named in a sentence is there.
    programs = {name for text in texts.values() for name in re.findall(r"python (benchmarks/\w+\.py)", text)}
    assert len(programs) > 20 and [name for name in programs if not (ROOT / name).exists()] == []
