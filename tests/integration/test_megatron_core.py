"""`attach` takes what Megatron's own functions return, `recollect megatron` runs its scripts; mistakes are refused by name."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forked_processes import run_forked
from metered_processes import needs_meter
from rank_processes import outputs_of, run_ranks, start_ranks
from recollect.cli import main
from tiers import long_but

PROGRAM = Path(__file__).parents[1] / "support/megatron_ranks.py"
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or not (dist.is_available() and dist.is_gloo_available()),
    reason="needs megatron-core, and torch.distributed with gloo",
)
_KINDS = ("sequence", "tensor", "data", "pipeline", "tensor, latent", "data, sharded", "pipeline, experts")


@needs_megatron
@needs_meter
@pytest.mark.parametrize("kind", long_but(("sequence", "pipeline"), _KINDS))
def test_gradients_weights_and_peaks_are_as_without_a_budget_and_as_under_its_own_recompute(kind: str) -> None:
    run_ranks(2, PROGRAM, kind)


_SETTINGS = """
import sys
sys.path.append(sys.argv[1])
import megatron_core_shim as shim
shim.install()
from megatron_core_models import CASES, Setting, megatron_subject
import recollect
from recollect.integrations.megatron import RecomputeConfig
from recollect.plans.action import Action

subject = megatron_subject(CASES["deepseek-v3"], Setting(name="none"))
profile = recollect.record(subject.model, None, step=lambda: subject.forward().backward())
for name in ("mla_up_proj", "moe_act"):
    plan = recollect.megatron_plan(profile, RecomputeConfig(recompute_granularity="selective", recompute_modules=[name]))
    actions = plan.units["decoder.layers.1"].actions
    print(name, *sorted(value for value, action in actions.items() if action is Action.RECOMPUTE))
"""


@needs_megatron
def test_modules_of_a_setting_are_found_in_its_own_layers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_SETTINGS, encoding="utf-8")
    done = run_forked(program, Path(__file__).parents[2] / "benchmarks")
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines() if line[:1] == "m"}
    linear = "LinearWithGradAccumulationAndAsyncCommunication"
    # As Megatron's `qkv_up_proj_and_rope_apply`: the two products, the rotation, and what puts the halves together.
    assert {f"self_attention.{part}.{linear}" for part in ("linear_q_up_proj", "linear_kv_up_proj")} < found[
        "mla_up_proj"
    ]
    assert {"self_attention.cat", "self_attention.cos", "self_attention.mul"} < found["mla_up_proj"]
    assert not any("core_attention" in value or "down_proj" in value for value in found["mla_up_proj"])
    assert {"mlp.experts.silu", "mlp.experts.mul"} <= found["moe_act"]
    assert not any("grouped_mm" in value for value in found["moe_act"])


SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = SUPPORT / "megatron_script/pretrain.py"


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
    f"{__file__} --recollect-budget 5% --recollect-host-budget lots": "--recollect-host-budget: got 'lots': does not begin",
    f"{__file__} --recollect-budget 5": "--recollect-budget: got '5': has no unit; write '5%'",
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
