"""Hugging Face's `Trainer`, and what is built on it, within a memory budget: same training, and nothing clashes unsaid."""

import json
import logging
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs accelerate")
import transformers  # noqa: E402
from accelerate import FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments  # noqa: E402

import hugging_face_flag  # noqa: E402
from gradients import assert_same_weights  # noqa: E402
from hugging_face_trainers import arguments, llama, texts  # noqa: E402
from recollect.attaching.attached import Attached  # noqa: E402
from recollect.errors import AlreadyAppliedError, BudgetWarning, ConfigError, NotYetError  # noqa: E402
from recollect.integrations.trainers import RemovingTrain  # noqa: E402
from recollect.integrations.transformers import MemoryBudget  # noqa: E402
from tiers import long_but  # noqa: E402


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(before)


def options(folder: Path, **changes: Any) -> Any:
    return arguments(str(folder), **{"max_steps": 12, "log_level": "error", "dataloader_pin_memory": False, **changes})


def small(layers: int = 2) -> Any:
    return llama(num_hidden_layers=layers)


def train(args: Any, *callbacks: Any, resume: str | None = None, layers: int = 2) -> Trainer:
    trainer = Trainer(small(layers), args, train_dataset=texts(), eval_dataset=texts(8), callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("engine", long_but(["tape"], ["tape", "graph"]))
def test_saving_evaluation_and_the_best_model_are_as_without_a_budget(engine: Any, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "bf16": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "logging_strategy": "steps",
        "load_best_model_at_end": True,
    }
    changes |= dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), 4)
    plain = train(options(tmp_path / "plain", **changes))
    budget = MemoryBudget("75%", engine=engine)
    within = train(options(tmp_path / "within", **changes), budget)
    assert_same_weights(plain.model, within.model)
    assert isinstance(budget.attached, Attached) and budget.attached.num_steps == 12
    assert not any("recollect" in str(vars(module).get("forward")) for module in within.model.modules())
    numbers = [entry for entry in within.state.log_history if "memory_budget_bytes" in entry]
    entry, *later = numbers
    assert "measured_slowdown" not in entry and bool(later) == (engine == "tape")
    # On a busy machine, the plan may be made anew.
    predicted = entry["predicted_slowdown"]
    assert all("measured_slowdown" in one or one["predicted_slowdown"] != predicted for one in later)
    assert entry["predicted_peak_bytes"] <= entry["memory_budget_bytes"] == budget.attached.budget_bytes
    assert entry["step"] == 1 and entry["predicted_slowdown"] > 0
    others = [entry for entry in within.state.log_history if entry not in numbers]
    for expected, got in zip(plain.state.log_history, others, strict=True):
        for key in ("step", "loss", "eval_loss", "grad_norm", "epoch"):
            assert expected.get(key) == got.get(key), key
    assert json.loads((tmp_path / "within/checkpoint-12/trainer_state.json").read_text())["log_history"][0] == entry


def test_a_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    plain = train(options(tmp_path / "plain"))
    args = options(tmp_path / "within", save_strategy="steps", save_steps=5)
    train(args, MemoryBudget("75%"))
    budget = MemoryBudget("75%")
    resumed = train(args, budget, resume=str(tmp_path / "within/checkpoint-5"))
    assert_same_weights(plain.model, resumed.model)
    assert budget.attached is not None and budget.attached.num_steps == 7


def test_host_memory_has_the_bits_of_training_without(tmp_path: Path) -> None:
    # Below what recompute by itself needs, whatever the speeds of this machine.
    budget = MemoryBudget("19%", host_budget="64MiB")
    args = options(tmp_path, max_steps=2, optim="sgd", per_device_train_batch_size=16)
    with pytest.warns(BudgetWarning, match="while it was recorded"):
        within = train(args, budget, layers=6)
    assert budget.attached is not None and budget.attached.plan is not None
    assert budget.attached.plan.offloads
    assert_same_weights(train(args, layers=6).model, within.model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "compile"}, "engine='compile': not yet: layers that DeepSpeed's engine runs"),
        (
            {"host_budget": "1GiB"},
            "host_budget='1GiB': not yet: values that leave the device in layers that DeepSpeed's",
        ),
    ],
)
def test_what_deepspeed_does_not_have_is_refused(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(NotYetError, match=message):
        MemoryBudget("75%", **settings)._section(options(tmp_path))


def test_the_line_goes_to_the_trainers_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers.trainer")
    log.addHandler(handler)
    transformers.logging.set_verbosity_warning()  # as it is by default; other tests change it
    try:
        train(options(tmp_path, log_level="passive", max_steps=2), MemoryBudget("75%"))
        said = [line for line in lines if line.startswith("recollect: ")]
        train(options(tmp_path, log_level="error", max_steps=2), MemoryBudget("75%"))
    finally:
        log.removeHandler(handler)
    assert len(said) == 1 and "planned for 2 calls of 4 x 64 in" in said[0]
    assert [line for line in lines if line.startswith("recollect: ")] == said, "a trainer that is quiet stays so"


class _Ending(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_an_interrupted_training_leaves_a_plain_model_and_can_begin_anew(tmp_path: Path) -> None:
    plain = train(options(tmp_path))
    budget = MemoryBudget("75%")
    trainer = Trainer(small(), options(tmp_path), train_dataset=texts(), callbacks=[budget, _Ending()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not any("recollect" in str(vars(module).get("forward")) for module in trainer.model.modules())
    trainer.remove_callback(_Ending)
    trainer.model.load_state_dict(small().state_dict())
    trainer.optimizer = None
    # A trainer seeds when it is made.
    transformers.set_seed(trainer.args.seed)
    trainer.train()
    assert_same_weights(plain.model, trainer.model)
    assert budget.attached is not None and budget.attached.num_steps == 12


def test_a_trainer_with_the_callback_pickles_as_without_it() -> None:
    trainer = Trainer.__new__(Trainer)
    vars(trainer)["train"] = RemovingTrain(trainer, lambda: None)
    copy = pickle.loads(pickle.dumps(trainer))
    assert copy.train == Trainer.train.__get__(copy)


def refused(folder: Path, error: type[Exception], text: str, **changes: Any) -> None:
    with warnings.catch_warnings():
        # The old name of the switch is deprecated from 5.23 on.
        warnings.simplefilter("ignore", FutureWarning)
        args = options(folder, **changes)
    with pytest.raises(error, match=text):
        Trainer(small(), args, train_dataset=texts(), callbacks=[MemoryBudget("75%")])


def test_the_trainers_own_recompute_is_refused(tmp_path: Path) -> None:
    text = r"got gradient_checkpointing=True: .* Drop it, .* set gradient_checkpointing=False"
    refused(tmp_path, ConfigError, text, gradient_checkpointing=True)
    if hasattr(options(tmp_path), "activation_checkpointing"):
        refused(tmp_path, ConfigError, text, activation_checkpointing=True)


def test_a_callback_that_is_added_later_looks_at_the_arguments_too(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        args = options(tmp_path, gradient_checkpointing=True)
    trainer = Trainer(small(), args, train_dataset=texts())
    trainer.add_callback(MemoryBudget("75%"))
    with pytest.raises(ConfigError, match="got gradient_checkpointing=True"):
        trainer.train()


def test_a_model_that_recomputes_by_itself_is_refused(tmp_path: Path) -> None:
    model = small()
    hugging_face_flag.enable(model)
    trainer = Trainer(model, options(tmp_path), train_dataset=texts(), callbacks=[MemoryBudget("75%")])
    with pytest.raises(AlreadyAppliedError, match=r"Hugging Face's gradient checkpointing; .*_disable\(\) first"):
        trainer.train()


class _TwoProcesses(TrainingArguments):
    world_size = 2


class _TwoGPUs(TrainingArguments):
    n_gpu = 2


class _Offloading(TrainingArguments):
    activation_offloading = True  # as in TRL's arguments


def test_what_is_not_there_yet_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("lomo", "galore_adamw_layerwise"):
        refused(tmp_path, NotYetError, rf"got optim='{name}': not yet: an optimizer that steps in backward", optim=name)
    for args, error, text in (
        (_TwoGPUs(str(tmp_path), use_cpu=True), NotYetError, "got n_gpu=2: not yet: .* torchrun --nproc-per-node 2"),
        (_Offloading(str(tmp_path), use_cpu=True), ConfigError, "got activation_offloading=True: .* Drop it"),
        (
            TrainingArguments(str(tmp_path), use_cpu=True, torch_compile_mode="reduce-overhead"),
            ConfigError,
            "got torch_compile=True, torch_compile_mode='reduce-overhead': .* Leave out torch_compile_mode, and",
        ),
    ):
        with pytest.raises(error, match=text):
            MemoryBudget("1GiB").on_init_end(args, None, None)


def test_another_trainer_in_two_processes_is_refused(tmp_path: Path) -> None:
    args = _TwoProcesses(str(tmp_path), use_cpu=True)
    text = (
        r"got world_size=2: not yet: a trainer other than Hugging Face's.* Leave MemoryBudget out, and pass the wrapped"
    )
    with pytest.raises(NotYetError, match=text):
        MemoryBudget("1GiB").on_train_begin(args, TrainerState(), None, model=small())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fsdp_version": 1}, NotYetError, r"got fsdp_version=1: not yet: .* Train with DDP, with FSDP2"),
        ({"fsdp_version": 2, "cpu_offload": True}, NotYetError, "got fsdp_config.cpu_offload=True: not yet"),
        (
            {"fsdp_version": 2, "activation_checkpointing": True},
            ConfigError,
            "fsdp_config.activation_.*=True: .* Drop it",
        ),
    ],
)
def test_what_fsdp_is_asked_to_do_is_refused(
    options: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        # The first version is deprecated.
        warnings.simplefilter("ignore")
        plugin = FullyShardedDataParallelPlugin(**options)

    class Sharding(Trainer):
        """Accelerate leaves the plugin out on CPUs."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.state.fsdp_plugin = plugin

    try:
        with pytest.raises(error, match=text):
            Sharding(small(), arguments(str(tmp_path)), train_dataset=texts(), callbacks=[MemoryBudget("75%")])
    finally:
        AcceleratorState._reset_state()


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.integrations.transformers.transformers.__version__", "4.49.0")
    with pytest.raises(ConfigError, match=r"got transformers='4.49.0': .* Install transformers 4.50 or later"):
        MemoryBudget("1GiB")
