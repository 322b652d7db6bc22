"""`recollect megatron` runs a script of Megatron's within a budget; and `attach` refuses what Megatron cannot mean, by name."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forked_processes import run_forked
from rank_processes import outputs_of, run_ranks, start_ranks
from recollect.cli import main

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = SUPPORT / "megatron_script/pretrain.py"


needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or not (dist.is_available() and dist.is_gloo_available()),
    reason="needs megatron-core, and torch.distributed with gloo",
)


@pytest.mark.long  # It starts Megatron in eight processes.
@needs_megatron
def test_a_run_saved_and_resumed_ends_with_the_weights_of_a_plain_one(tmp_path: Path) -> None:
    for steps in ((0, 2), (2, 4)):
        run_ranks(2, SCRIPT, tmp_path / "plain", *steps)
        flags = ("--recollect-budget=75%", "--recollect-on-larger", "raise")
        started = start_ranks(2, "recollect", "megatron", SCRIPT, tmp_path / "planned", *flags, *steps)
        outputs_of(started)
        # Of the first rank, since they run one plan.
        assert [process.communicate()[1].count("recollect: ") for process in started] == [1, 0]
    for rank in range(2):
        plain, planned = (torch.load(tmp_path / f"{name}.{rank}") for name in ("plain", "planned"))
        assert all(torch.equal(weight, planned[name]) for name, weight in plain.items() if weight is not None)


SCRIPTS = {
    "import sys; assert __name__ == '__main__' and sys.argv == ['train.py', '--lr', '1']": (
        2,
        "Error: recollect megatron train.py: it ended without a call of megatron.training.training.setup_model_and_optimizer, "
        "so it ran without a budget. Call recollect.attach(model, optimizer, budget) in the script, where its model and "
        "optimizer are made.\n",
    ),
    "import megatron_lm, megatron.core.no_such": (1, "ModuleNotFoundError: No module named 'megatron_lm'\n"),
    "raise ModuleNotFoundError('No module named megatron', name='megatron')": (
        2,
        "Error: recollect megatron train.py: No module named megatron. Put the folder of Megatron-LM on PYTHONPATH.\n",
    ),
    "raise SystemExit(3)": (3, ""),
}


@pytest.mark.parametrize("source", SCRIPTS)
def test_a_script_that_makes_no_model(source: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    words = ("megatron", "--recollect-budget", "1GiB", "train.py", "--lr", "1")
    done = run_forked("recollect", *words, cwd=tmp_path, COLUMNS="1000")
    code, text = SCRIPTS[source]
    assert (done.returncode, done.stderr.endswith(text)) == (code, True), done.stderr


MISTAKES = {
    "": "recollect megatron: got no script, expected one: recollect megatron pretrain_gpt.py --recollect-budget 70GiB ...",
    "no.py --recollect-budget 1": "recollect megatron no.py: no such file, expected a training script of Megatron's.",
    "no.py --lr 1": "--recollect-budget: missing. Bound on the peak of the step on each device",
    "no.py --recollect-budget 1 --recollect-bugdet 1": "--recollect-bugdet: no such flag of recollect megatron. Did you mean",
    "--lr 1 no.py --recollect-budget 1": "--lr: no such flag of recollect megatron.",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_flags_that_do_not_parse(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["megatron", *words.split()]) == 2
    assert " ".join(capsys.readouterr().err.split()).startswith(f"Error: {MISTAKES[words]}")


REFUSED = {
    "DDP": "RecordError: cannot attach to GPTModel: PyTorch's DistributedDataParallel wraps it, expected Megatron's, whose "
    "gradient buffers its optimizers step from. Pass what get_model returns, which wraps by itself.",
    "FSDP": "UnsupportedModelError: cannot attach to GPTModel: MegatronFSDP wraps it, which frees parameters after each "
    "layer's forward, and a plan needs them to run ops again. Use --use-distributed-optimizer in its place.",
    "optimizer": "RecordError: optimizer: none of the 41 parameters of Adam",
    "pages": "AlreadyAppliedError: cannot attach to GPTModel: it offloads by itself (moe_paged_stash=True).",
    "graphs": "ConfigError: got enable_cuda_graph=True: GPTModel would run in CUDA graphs",
    "order": "RecordError: cannot attach to GPTModel: got the virtual stages [1, 0], expected [0, 1]. Pass the list that "
    "get_model returns, unchanged.",
    "one of two": "RecordError: cannot attach to GPTModel: got the virtual stages [0], expected [0, 1].",
    "groups": "ConfigError: got tensor_model_parallel_size=2: megatron.core.parallel_state has no groups, and the ranks of "
    "GPTModel are not known. Call parallel_state.initialize_model_parallel first; or pass group=",
    "versions": "megatron-core 0.21.0 has not been tried: recollect is tested with megatron-core 0.16.1 and 0.19.2. Compare "
    "the loss of the first steps with a run without recollect.",
}


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    done = run_forked(SUPPORT / "megatron_mistakes.py")
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@needs_megatron
@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_belong_together_is_one_error(kind: str, refused: dict[str, str]) -> None:
    assert refused[kind].startswith(REFUSED[kind])
    assert "right" not in refused and refused["versions"].count("megatron-core 0.21.0") == 1
