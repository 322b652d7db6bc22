"""What `diagnose` takes, refuses and merges, whatever the rule; and each text rule on a real text."""

import bz2
import doctest
import gzip
import lzma
import os
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from pages import doctor  # noqa: E402

import recollect
from recollect.doctor.rule import ONE_SPEAKS, TOGETHER, TOPICS, passages
from recollect.errors import DiagnosisError
from recollect.integrations.megatron.rules import RULES as CLASHES

TESTS = Path(__file__).parent
ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
sys.path.append(str(ROOT))


GRAPHS = "AssertionError: full recompute is only supported with full iteration CUDA graph."


def test_nothing_is_found_in_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.log"
    path.touch()
    assert recollect.diagnose(path) == []
    assert recollect.diagnose("all went well\n") == []
    assert recollect.diagnose() == []


def test_a_text_too_long_for_a_file_name() -> None:
    assert recollect.diagnose("x " * 5000) == []


def test_a_text_a_path_and_several() -> None:
    assert recollect.diagnose(GRAPHS) == recollect.diagnose(f"{GRAPHS}\n")
    (both,) = recollect.diagnose(GRAPHS, f"\n{GRAPHS}")
    assert both.evidence == (f"text:1: {GRAPHS}", f"text:2: {GRAPHS}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.log", None, r"no\.log: cannot be read \(No such file or directory\), expected a file"),
        (
            "x.log.gz",
            gzip.compress(b"a log", mtime=0)[:-9],
            r"x\.log\.gz: cannot be unpacked \(.*\), expected a whole file of gzip, bzip2 or xz",
        ),
        (
            "x.pickle.gz",
            gzip.compress(b"\x80\x04.", mtime=0),
            r"got a compressed binary file, expected a log\. Unpack it first",
        ),
        ("model.bin", b"ab\x00cd", "got a binary file, expected text, a configuration, or a snapshot"),
        ("x.json", b"{'a': 1}", "got malformed JSON"),
        ("x.yaml", b"a: [1\n", "got malformed YAML"),
        ("x.yaml", b"- 1\n- 2\n", "got a YAML list, expected a mapping of settings"),
    ],
)
def test_unreadable(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DiagnosisError, match=message):
        recollect.diagnose(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_text_as_windows_writes_it(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(GRAPHS, encoding=encoding)
    (found,) = recollect.diagnose(path)
    assert found.evidence == (f"{path}:1: {GRAPHS}",)
    settings = tmp_path / "args.json"
    settings.write_text('{"recompute_granularity": "full", "recompute_method": "block"}', encoding=encoding)
    assert [found.rule for found in recollect.diagnose(settings)] == ["megatron-full-needs-num-layers"]


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="needs paths of pipes")
def test_a_pipe_is_read_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, GRAPHS.encode())
    os.close(writer)
    (found,) = recollect.diagnose(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    assert found.evidence == (f"/dev/fd/{reader}:1: {GRAPHS}",)


@pytest.mark.parametrize("module", [gzip, bz2, lzma], ids=lambda module: module.__name__)
def test_a_compressed_log_is_read_as_it_is(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.log.packed"
    path.write_bytes(module.compress(f"step 1\n{GRAPHS}\n".encode()))
    (found,) = recollect.diagnose(path)
    (expected,) = recollect.diagnose(f"step 1\n{GRAPHS}\n")
    assert (found.rule, found.problem) == (expected.rule, expected.problem)
    assert found.evidence == (f"{path}:2: {GRAPHS}",)


def test_a_folder_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(DiagnosisError, match=r"cannot be read \(Is a directory\)"):
        recollect.diagnose(tmp_path)


TEXTS = TESTS / "texts"
SELECTIVE, DISTRIBUTE = "megatron-selective-has-no-method", "megatron-distribute-without-tensor-parallel"
WATCHDOG = (TEXTS / "watchdog-timeout.txt").read_text(encoding="utf-8")
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
RAN_OUT = (TEXTS / "memory-full.txt").read_text(encoding="utf-8").splitlines()[-1]
LOGITS = (TEXTS / "memory-in-logits.txt").read_text(encoding="utf-8")
NO_INPUT = "UserWarning: None of the inputs have requires_grad=True. Gradients will be None"
NO_GRAD = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
REENTRANT = "UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly."
TWICE = "RuntimeError: Expected to mark a variable ready only once."
VOCABULARY = "--recompute-activations --seq-length 8192 --micro-batch-size 4 --vocab-size 128000"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (f"{NO_INPUT}\n{NO_GRAD}\n", "no-input-requires-grad"),
        (f"{REENTRANT}\n{TWICE}\n", "ready-twice"),
        (f"{REENTRANT}\n{NO_INPUT}\n{NO_GRAD}\n", "no-input-requires-grad"),
        # One rank ran out of memory, and the others waited.
        (f"{WATCHDOG}\n{RAN_OUT}\n", "memory-full"),
        (f"{LOGITS}\n{WATCHDOG}\n", "memory-in-logits"),
        (f"x.py {FULL} 1 --num-layers 4 --cuda-graph-impl local\n{GRAPHS}\n", "megatron-full-and-graphs"),
        ("x.py --recompute-granularity full\n", "megatron-full-needs-method"),
        ("x.py --recompute-granularity selective --recompute-method block --recompute-num-layers 1\n", SELECTIVE),
        ("x.py --recompute-granularity selective --distribute-saved-activations\n", "megatron-distribute-needs-full"),
        (f"x.py {FULL} 1 --distribute-saved-activations --sequence-parallel\n", DISTRIBUTE),
        (f"x.py {FULL} 1 --recompute-modules mlp\n", "megatron-modules-with-full"),
    ],
)
def test_one_mistake_is_one_finding(text: str, rule: str) -> None:
    (finding,) = recollect.diagnose(text)
    assert finding.rule == rule
    assert len(finding.evidence) >= 1 + ("\n" in text.strip())


def test_settings_that_are_mended_together_have_all_of_the_advice() -> None:
    (finding,) = recollect.diagnose("x.py --recompute-granularity full\n")
    assert [advice.partition(",")[0].rstrip(".") for advice in finding.fix] == [
        "Set recompute_method to 'uniform' or 'block'",
        "Set recompute_num_layers",
    ]


def test_a_large_vocabulary_is_one_mistake() -> None:
    assert "logits-large" in [finding.rule for finding in recollect.diagnose(f"x.py {VOCABULARY}\n")]
    found = recollect.diagnose(f"x.py {VOCABULARY}\n{LOGITS}\n")
    assert found[0].rule == "memory-in-logits" and "logits-large" not in [finding.rule for finding in found]
    assert any("vocab_size: 128000" in line for line in found[0].evidence)


def test_names_of_one_mistake_are_of_rules() -> None:
    known = {rule.name for rules in TOPICS.values() for rule in rules} | {f"megatron-{rule.name}" for rule in CLASHES}
    assert {name for names in (*ONE_SPEAKS, *TOGETHER) for name in names} <= known


def test_what_ends_a_run_comes_first() -> None:
    certain, fatal = REENTRANT, RAN_OUT
    found = recollect.diagnose(f"{certain}\n{fatal}\n")
    assert [(finding.rule, finding.fatal) for finding in found] == [
        ("memory-full", True),
        ("reentrant-by-default", False),
    ]
    assert found[0].to_data()["fatal"] is True


def test_settings_that_may_end_a_run_have_not_ended_it(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"gradient_checkpointing": true, "num_local_experts": 8}')
    (finding,) = recollect.diagnose(path)
    assert (finding.rule, finding.certainty, finding.fatal) == ("metadata-routing", "possible", False)


def test_the_most_certain_comes_first() -> None:
    found = recollect.diagnose(
        f"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1\n{GRAPHS}\n"
    )
    assert [finding.certainty for finding in found] == ["certain", "possible"]


def test_each_rule_once_for_many_ranks() -> None:
    text = "".join(f"[rank{i}]: {GRAPHS}\n" for i in range(64))
    (finding,) = recollect.diagnose(text)
    assert finding.evidence == (f"text:1: {GRAPHS}", "and 63 more lines like it")


def test_ranks_are_read_apart() -> None:
    lines = ["[rank0]: a", "[rank1]: b", "[rank0]: c", "[rank1]: d", "[rank0]: e"]
    (passage,) = passages(lines, "log", lambda line: line.endswith("c"))
    assert (passage.before, passage.line, passage.after) == (("a",), "c", ["e"])


def test_colours_and_progress_bars(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(f"  0%|   | 0/10\r 10%|#  | 1/10\r\x1b[31m{GRAPHS}\x1b[0m\n\xff\xfe".encode("latin-1"))
    (finding,) = recollect.diagnose(path)
    assert finding.evidence == (f"{path}:3: {GRAPHS}",)


def test_a_long_log_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    line = " iteration       10/  120000 | elapsed time per iteration (ms): 1993.9 | lm loss: 6.1 | grad norm: 1.2 |\n"
    with path.open("w") as file:
        for _ in range(10):
            file.write(line * 10_000)
        file.write("x" * 2_000_000 + "\n")  # one line, which no memory should hold as a whole more than needed
        file.write(f"{GRAPHS}\n")
    tracemalloc.start()
    (finding,) = recollect.diagnose(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert finding.rule == "megatron-full-and-graphs"
    assert peak < 8 * 2**20 < path.stat().st_size


def test_every_rule_has_a_test() -> None:
    tested = "".join(path.read_text(encoding="utf-8") for path in (*TESTS.glob("*.py"), *TESTS.glob("texts/*.txt")))
    names = [rule.name for rules in TOPICS.values() for rule in rules]
    assert [name for name in names if name not in tested] == []
    assert len(names) == len(set(names))


def test_the_page_has_the_rules_of_today() -> None:
    assert doctest.testmod(doctor).failed == 0
    assert doctor.rules_table() in (DOCS / "doctor.md").read_text(encoding="utf-8")


REAL_TEXTS = sorted((Path(__file__).parent / "texts").glob("*.txt"))


@pytest.mark.parametrize("path", REAL_TEXTS, ids=lambda path: path.stem)
def test_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    expected = re.search(r"^# finds: (.+)$", text, re.MULTILINE)
    assert text.startswith("# source: ")
    found = recollect.diagnose(path)
    assert {finding.rule for finding in found} == set(expected[1].split(", "))
    for finding in found:
        assert finding.evidence[0].startswith(str(path))
        assert "{" not in finding.problem.replace('{"', ""), "a number that was not filled in"
