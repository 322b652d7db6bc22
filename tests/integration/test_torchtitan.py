"""torchtitan within a memory budget: planned on the meta device from the job's shapes, or from a plan file."""

import dataclasses
import functools
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp

pytest.importorskip("torchtitan", reason="needs torchtitan")
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402

import toy_profile  # noqa: E402
from metered_processes import check_row, metered, needs_meter  # noqa: E402
from recollect.engine.content import has_same_bits  # noqa: E402
from recollect.errors import BudgetTooSmallError, BudgetWarning, ConfigError, ConfigWarning, NotYetError  # noqa: E402
from recollect.integrations import torchtitan  # noqa: E402
from recollect.integrations.torchtitan import MemoryBudget  # noqa: E402
from recollect.planning.compiled_menu import compiled_menu  # noqa: E402
from recollect.plans.plan import Plan  # noqa: E402
from recollect.plans.unit_plan import UnitPlan  # noqa: E402
from recollect.profile.variant import VariantRecord  # noqa: E402
from recollect.recording import engines  # noqa: E402

WIDTH, WORDS = 32, 64
OPTIMIZER = dataclasses.replace(default_adamw(), implementation="for-loop")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Has the parts of torchtitan's decoders that the policy looks at; their own module needs Triton."""

    config = SimpleNamespace(max_seq_len=16)
    _skip_lm_head = False

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(4)})
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        x = self.norm(x)
        return x if self._skip_lm_head else self.lm_head(x)


def on_meta() -> Decoder:
    with torch.device("meta"):
        return Decoder()


def made_real(model: Decoder) -> Decoder:
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def config(**changes: Any) -> MemoryBudget.Config:
    settings: dict[str, Any] = {
        "memory_budget": "85%",
        "local_batch_size": 4,
        "optimizer": OPTIMIZER,
        "hardware": "cpu",
    }
    return MemoryBudget.Config(**{**settings, **changes})


def gradients(model: Decoder) -> list[Tensor]:
    tokens = torch.randint(0, WORDS, (4, 16), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_plan_made_on_meta_stays_when_the_model_becomes_real(tmp_path: Path) -> None:
    expected = gradients(made_real(on_meta()))
    model = on_meta()
    policy = config().build(dump_folder=str(tmp_path / "dump"))
    policy.apply(model)
    assert "recompute" in policy.plan.to_json() and policy.plan.predicted_peak_bytes <= policy.plan.budget_bytes
    assert all(map(has_same_bits, expected, gradients(made_real(model))))
    other = on_meta()
    file = config(plan_file=str(tmp_path / "dump/recollect_plan.json")).build(dump_folder="")
    file.apply(other)
    assert file.plan == policy.plan
    assert all(map(has_same_bits, expected, gradients(made_real(other))))


@pytest.fixture(name="compiling")
def policy_of_a_job_that_compiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two ways to compile blocks are enough: PyTorch's own, and the leanest."""
    leanest = functools.partial(engines.with_variants, menu=lambda graph: compiled_menu(graph)[:1])
    monkeypatch.setattr(engines, "with_variants", leanest)
    return config(memory_budget="82%").build(dump_folder="")


def parallelize(model: Decoder, policy: Any, *, compile_config: CompileConfig) -> None:
    """As torchtitan's functions of this name, which get the command line's flags and give a policy the model alone."""
    policy.apply(model)


def test_blocks_that_torchtitan_will_compile_are_planned_so(compiling: Any) -> None:
    parallelize(on_meta(), compiling, compile_config=CompileConfig(enable=True))
    units = compiling.plan.units.values()
    assert {str(unit.engine) for unit in units} == {"compile"} and any(unit.actions for unit in units)
    with pytest.raises(ConfigError, match="compile.backend='aot_eager': only Inductor takes a plan"):
        parallelize(on_meta(), compiling, compile_config=CompileConfig(enable=True, backend="aot_eager"))


@pytest.mark.parametrize("changes", [{}, {"enable": True, "components": ["loss"]}])
def test_blocks_that_torchtitan_will_not_compile_run_on_the_tape(changes: dict[str, Any]) -> None:
    policy = config().build(dump_folder="")
    parallelize(on_meta(), policy, compile_config=CompileConfig(**changes))
    assert {str(unit.engine) for unit in policy.plan.units.values()} == {"tape"}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it.
def test_blocks_that_torchtitan_compiles_after_the_plan(compiling: Any) -> None:
    plain, planned = on_meta(), on_meta()
    parallelize(planned, compiling, compile_config=CompileConfig(enable=True))
    for model in (plain, planned):
        for layer in model.layers.values():
            layer.compile(backend="inductor", fullgraph=True)
        made_real(model)
    for _ in range(3):
        assert all(map(has_same_bits, gradients(plain), gradients(planned)))


def test_the_job_decides_what_is_planned() -> None:
    def peak(**changes: Any) -> int:
        policy = config(memory_budget="100%", **changes).build(dump_folder="")
        policy.apply(on_meta())
        return int(policy.plan.predicted_peak_bytes)

    assert peak() == peak(seq_len=16) < peak(seq_len=32)
    assert peak() < peak(gradient_accumulation_steps=2)
    assert peak(local_batch_size=64) > peak(local_batch_size=64, loss=ChunkedLossWrapper.Config())


def test_a_policy_of_a_job() -> None:
    training = TrainingConfig(local_batch_size=3, seq_len=24, disable_cuda_graphs=True, mixed_precision_param="float32")
    loss = ChunkedLossWrapper.Config(num_chunks=4)
    job = SimpleNamespace(
        training=training, parallelism=ParallelismConfig(), compile=CompileConfig(), loss=loss, optimizer=OPTIMIZER
    )
    made = MemoryBudget.of_job(job, "1GiB")
    assert (made.memory_budget, made.local_batch_size, made.seq_len) == ("1GiB", 3, 24)
    assert made.loss is loss and made.optimizer is OPTIMIZER and made.gradient_accumulation_steps == 1
    training.global_batch_size = 12
    assert MemoryBudget.of_job(job).gradient_accumulation_steps == 2 and made.engine == "auto"
    job.compile = CompileConfig(enable=True)
    assert MemoryBudget.of_job(job).engine == "compile"
    job.compile = CompileConfig(enable=True, components=["loss"], backend="aot_eager")
    assert MemoryBudget.of_job(job).engine == "auto"
    job.compile = CompileConfig(enable=True, backend="aot_eager")
    with pytest.raises(ConfigError, match="compile.backend='aot_eager': only Inductor takes a plan"):
        MemoryBudget.of_job(job)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"training": TrainingConfig()}, "disable_cuda_graphs=False.*Set --training.disable_cuda_graphs"),
        (
            {"training": TrainingConfig(disable_cuda_graphs=True)},
            "mixed_precision_param='bfloat16'.*Set both to the same",
        ),
        ({"parallelism": ParallelismConfig(tensor_parallel_degree=2)}, "tensor_parallel_degree=2.*plan_file"),
    ],
)
def test_jobs_that_cannot_be_planned_yet(changed: dict[str, Any], message: str) -> None:
    training = TrainingConfig(disable_cuda_graphs=True, mixed_precision_param="float32")
    parts = {"training": training, "parallelism": ParallelismConfig(), "compile": CompileConfig()}
    job = SimpleNamespace(**{**parts, **changed}, loss=CrossEntropyLoss.Config(), optimizer=OPTIMIZER)
    with pytest.raises(NotYetError, match=message):
        MemoryBudget.of_job(job)
    if "plan_file" in message or "same" in message:
        assert MemoryBudget.of_job(job, plan_file="plan.json").plan_file == "plan.json"


def test_a_larger_batch_is_warned_about_once() -> None:
    model = on_meta()
    config().build(dump_folder="").apply(model)
    made_real(model)
    tokens = torch.zeros(5, 16, dtype=torch.int64)
    message = (
        "got a batch of 5 x 16 tokens, planned for 64: the step may exceed its memory budget. Set local_batch_size"
    )
    with pytest.warns(BudgetWarning, match=message):
        model(tokens)
    model(tokens)
    model(tokens[:4])


def test_settings_without_effect_are_warned_about() -> None:
    with pytest.warns(ConfigWarning, match="determinism_check has no effect under a plan: random numbers are always"):
        config(determinism_check="none").build(dump_folder="")


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    part = on_meta()
    part.lm_head = None
    with pytest.raises(NotYetError, match=r"model='no lm_head': not yet: a record of one rank's part.*plan_file"):
        config().build(dump_folder="").apply(part)
    unknown = on_meta()
    monkeypatch.setattr(Decoder, "config", None)
    with pytest.raises(ConfigError, match=r"Decoder has no config.max_seq_len.*Set seq_len to the job's"):
        config().build(dump_folder="").apply(unknown)
    with pytest.raises(BudgetTooSmallError, match="below the least possible peak"):
        config(seq_len=16, memory_budget="1 KiB").build(dump_folder="").apply(on_meta())
    monkeypatch.setattr("torchtitan.__version__", "0.2.1")
    with pytest.raises(ConfigError, match=r"torchtitan='0\.2\.1'.*Install torchtitan 0\.3 or later"):
        config().build(dump_folder="")


def test_attention_that_also_returns_normalizers_is_refused() -> None:
    tensor = torch.zeros(1, 2, 2, 4)
    with pytest.raises(NotYetError, match="out_transform=.*a record of attention that also returns its normalizers"):
        torchtitan._fused_attention(tensor, tensor, tensor, out_transform=len)


def test_compiled_blocks_keep_attention_that_cannot_be_recorded() -> None:
    """In the layer of this profile `mlp` stands for it; a plan does not name what other ops compute there."""
    kinds = ((1, 2, 3), (), (2, 3), (2,))
    variants = tuple(VariantRecord(kept, (), 8, 8, (), 1.0, is_default=kept == (1, 2, 3)) for kept in kinds)
    profile = torchtitan._keeping(
        toy_profile.stack(2, graph=dataclasses.replace(toy_profile.layer(), variants=variants)), ("layers.0.mlp",)
    )
    assert [one.kept for one in profile.graphs[1].variants] == [(1, 2, 3), (2, 3)]
    actions = {"norm.mul": "recompute", "mlp.up.mm": "keep"}
    units = {f"layers.{number}": UnitPlan(actions, engine=engine) for number, engine in enumerate(("compile", "tape"))}
    found = torchtitan._without_names(Plan(units), ("layers.0.mlp", "layers.1.mlp")).units
    assert [list(unit.actions) for unit in found.values()] == [["norm.mul"], ["norm.mul", "mlp.up.mm"]]


def needs_models() -> None:
    pytest.importorskip("triton", reason="torchtitan's models need Triton")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("torchtitan's models need DataParallelMeshDims, which torch 2.11 does not have")


def test_attention_that_cannot_be_recorded_is_kept() -> None:
    needs_models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchtitan's imports use what is deprecated.
        from torchtitan_models import llama3, policy

    chosen: Any = policy("95%", CrossEntropyLoss.Config())
    model = llama3(attention="flex")
    chosen.apply(model)
    dropped = [
        name for unit in chosen.plan.units.values() for name, action in unit.actions.items() if action == "recompute"
    ]
    assert dropped and not any("inner_attention" in name for name in dropped)
    # The same as with attention that can be recorded, and would not be dropped.
    other: Any = policy("95%", CrossEntropyLoss.Config())
    other.apply(llama3())
    assert re.sub("[0-9.]+", "", str(other.plan)) == re.sub("[0-9.]+", "", str(chosen.plan))
    assert isinstance(chosen.plan, Plan)


@needs_meter
@pytest.mark.parametrize(
    "name",
    ["cross entropy", "cross entropy in chunks, two micro-batches", pytest.param("compiled", marks=pytest.mark.long)],
)
def test_every_step_of_llama3_is_within_the_budget(name: str) -> None:
    needs_models()
    with metered("torchtitan_models") as cases:
        check_row(*cases[name])
