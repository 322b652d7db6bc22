"""Checkpoints of several processes, and of one: the same bits in every layout, whole or not there, refused when damaged."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asked_cases import AskedCases, asked_cases
from checkpoint_ranks import EVERY, EXPERT_LAYOUTS, FIRST, LAYOUTS, OLDER, STEPS, copy_of, losses_of, settings
from rank_processes import start_ranks
from recollect.lab.train.checkpoint import list_checkpoints
from recollect.lab.train.session import open_session
from tiers import long_but
from training_runs import write_text

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")
NEWEST = f"step_{STEPS:08d}"
OTHERS = [name for name in LAYOUTS if name != FIRST]
BUILT = [*(f"built: {name}" for name in LAYOUTS), *(f"built experts: {name}" for name in EXPERT_LAYOUTS)]
# The others are parts of these, or pairs of their parts.
QUICK_BUILT = [f"built: {name}" for name in ("replicas", FIRST, "PP ZeRO")]
QUICK_BUILT += [f"built experts: {name}" for name in ("EP CP", "EP PP ZeRO", "EP TP")]
# Of each kind the first ones, as each goes on from the one before: from replicas to parts of matrices, and of experts.
QUICK_LAYOUTS = 2
REWRITTEN = [*(("", number) for number in range(len(LAYOUTS))), *((" experts", n) for n in range(len(EXPERT_LAYOUTS)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoints")
    write_text(made)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    return losses_of(settings(folder, "alone"))["losses"]


@pytest.fixture(scope="module")
def alone_with_experts(folder: Path) -> None:
    losses_of(settings(folder, "alone experts", steps=EVERY))


@pytest.fixture(scope="module")
def found(folder: Path) -> Iterator[AskedCases]:
    started = start_ranks(4, ROOT / "tests/support/checkpoint_ranks.py", folder, has_input=True)
    with asked_cases(started) as cases:
        yield cases


def test_resumed_on_the_same_layout_the_losses_are_the_same_to_the_bit(found: AskedCases) -> None:
    """With dropout, so that random number states matter; they differ by rank."""
    for rank in range(4):
        for whole, resumed in (("trained: dropout", "resumed"), ("trained: pipeline", "resumed pipeline")):
            losses = found[whole][rank]["losses"]
            assert len(losses) == STEPS and found[resumed][rank]["losses"] == losses[EVERY:]
    assert found["trained: dropout"][0]["losses"] != found["trained: plain"][0]["losses"]


@pytest.mark.parametrize("layout", long_but(("TP", "PP ZeRO"), OTHERS))
def test_resumed_on_another_layout_the_losses_differ_in_their_last_bits(found: AskedCases, layout: str) -> None:
    whole, resumed = found["trained: plain"][0]["losses"], found[f"resumed as: {layout}"][0]["losses"]
    assert resumed == pytest.approx(whole[EVERY:], rel=2e-6)


@pytest.mark.long
def test_four_processes_go_on_from_one(found: AskedCases, alone: list[float]) -> None:
    assert found[f"from one as: {FIRST}"][0]["losses"] == pytest.approx(alone[EVERY:], rel=2e-6)


def test_one_process_goes_on_from_four(found: AskedCases, folder: Path) -> None:
    whole = found["trained: plain"][0]["losses"]
    copy_of(folder, "plain", "plain as one")
    resumed = losses_of(settings(folder, "plain as one", resume=True))["losses"]
    assert resumed == pytest.approx(whole[EVERY:], rel=2e-6)
    # A folder of four processes, then one of a single process.
    paths = list_checkpoints(folder / "plain_as_one" / "checkpoints")
    assert [(path.name, len([*path.glob("random_*")])) for path in paths] == [(OLDER, 4), (NEWEST, 1)]


@pytest.mark.usefixtures("alone", "alone_with_experts")
@pytest.mark.parametrize(
    ("kind", "number"),
    [pytest.param(*case, marks=pytest.mark.long if case[1] > QUICK_LAYOUTS else ()) for case in REWRITTEN],
)
def test_what_is_stored_is_the_whole_model_whatever_the_layout(
    found: AskedCases, folder: Path, kind: str, number: int
) -> None:
    """One process writes, each layout reads what the one before wrote, one process reads: not a bit has changed."""
    # Each goes on from the one before.
    rows = [found[f"rewritten{kind}: {earlier}"] for earlier in range(number + 1)]
    if not (folder / f"as_one{kind}".replace(" ", "_")).exists():
        copy_of(folder, f"alone{kind}", f"as one{kind}")
    written = open_session(settings(folder, f"as one{kind}", resume=True, steps=20))
    assert written.step == EVERY
    name = f"rewritten{kind} as one {number}"
    copy_of(folder, f"rewritten{kind} {number}", name, newest=EVERY + number + 1)
    session = open_session(settings(folder, name, resume=True, steps=20))
    assert session.step == EVERY + number + 1, rows
    read, expected = session.stored_state().tensors, written.stored_state().tensors
    assert read.keys() == expected.keys()
    assert [key for key in read if not torch.equal(read[key], expected[key])] == []


@pytest.mark.parametrize("case", long_but(QUICK_BUILT, BUILT))
def test_processes_draw_their_parts_of_the_weights_of_one(found: AskedCases, case: str) -> None:
    """Bit for bit, and with no more at a time than their own part, one whole matrix, which is less than a block, and numbers.

    DDP also makes buckets for all gradients, and sends copies, of 250 MB at a time.
    """
    rows = found[case]
    for row in rows:
        assert row["differing"] == []
        of_ddp_bytes = 2 * row["own_bytes"] if "replicas" in case else 0
        assert row["peak_bytes"] <= row["own_bytes"] + row["largest_bytes"] + of_ddp_bytes + 4096
        assert (row["own_bytes"] + row["largest_bytes"] < row["whole_bytes"]) == ("replicas" not in case)
    names = {name for row in rows for name in row["names"]}
    assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"} <= names
    assert ("decoder.layers.1.mlp.router.expert_bias" in names) == ("experts" in case)


def test_a_failed_write_is_an_error_in_all_processes(found: AskedCases) -> None:
    first = found["full"][0]["error"]
    assert f"{OLDER}: cannot be written by rank 0 (Not a directory), expected a writable folder" in first
    assert {row["error"] for row in found["full"]} == {first}


def test_damage_is_the_same_error_in_all_processes(found: AskedCases) -> None:
    assert found["trained: plain"]
    rows = found["damaged"]
    assert re.search(rf"{NEWEST}: got \d+ bytes instead of \d+ in its file random_3\.pt", rows[0]["error"])
    assert rows[0]["error"].endswith(f"Remove it to resume from the older {OLDER}.")
    assert {row["error"] for row in rows} == {rows[0]["error"]}
