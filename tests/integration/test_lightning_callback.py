"""Lightning's `Trainer` within a memory budget: same training, and nothing clashes unsaid."""

import copy
import csv
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs lightning")
import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

import recollect.integrations.lightning as integration  # noqa: E402
from gradients import assert_same_weights  # noqa: E402
from lightning_trainers import Automatic, loader, trainer  # noqa: E402
from recollect.errors import AlreadyAppliedError, ConfigError, MissingPackageError, NotYetError  # noqa: E402
from recollect.integrations.lightning import MemoryBudget  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]


def fit(
    folder: Path, *callbacks: Any, module: Automatic | None = None, path: str | None = None, **changes: Any
) -> Automatic:
    module = module or Automatic()
    runs = trainer(str(folder), *callbacks, **{"max_epochs": 2, **changes})
    runs.fit(module, loader(3), loader(1), ckpt_path=path)
    return module


def test_checkpoints_evaluation_and_logs_are_as_without_a_budget(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"limit_val_batches": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 1}
    changes |= {"enable_checkpointing": True}
    plain = fit(tmp_path / "plain", logger=CSVLogger(tmp_path / "plain"), **changes)
    budget = MemoryBudget("75%")
    within = fit(tmp_path / "within", budget, logger=CSVLogger(tmp_path / "within"), **changes)
    assert_same_weights(plain, within)
    assert budget.attached.num_steps == 12
    assert budget.attached.recorded_steps == [0], "Lightning's zero_grad between forward and backward is seen"
    assert not any("recollect" in str(vars(part).get("forward")) for part in within.modules())
    (log,) = (tmp_path / "within").rglob("metrics.csv")
    with log.open() as file:
        numbers = [row for row in csv.DictReader(file) if row["memory_budget_bytes"]]
    # Once when it was planned, and again when its steps had been timed.
    assert {int(float(row["memory_budget_bytes"])) for row in numbers} == {budget.attached.budget_bytes}
    assert not numbers[0]["measured_slowdown"] and numbers[-1]["measured_slowdown"]
    assert list((tmp_path / "within").rglob("*.ckpt"))


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    for name, callbacks in (("plain", []), ("within", [MemoryBudget("75%")])):
        runs = trainer(str(tmp_path), *callbacks)
        runs.fit(Automatic(), loader(3), loader(1))
        runs.save_checkpoint(tmp_path / name)
    plain = fit(tmp_path, path=str(tmp_path / "plain"))
    assert_same_weights(plain, fit(tmp_path, MemoryBudget("75%"), path=str(tmp_path / "within")))


def test_the_line_goes_to_lightnings_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    runs = trainer(str(tmp_path), MemoryBudget("75%"), max_steps=1)
    log.setLevel(logging.INFO)
    runs.fit(Automatic(), loader(1), loader(1))
    log.setLevel(logging.NOTSET)
    _, line = [text for text in caplog.messages if text.startswith("recollect: ")]
    assert "planned for 4 x 64 in" in line


def test_a_copy_of_the_module_in_training_is_a_plain_one(tmp_path: Path) -> None:
    copies: list[Automatic] = []

    class Copying(pl.Callback):
        def on_train_batch_end(self, runs: pl.Trainer, pl_module: Any, *_: Any) -> None:
            if runs.global_step == 6:  # The last one: steps beside a copy do not fit into the budget, and would say so.
                copies.append(copy.deepcopy(pl_module))

    fit(tmp_path, MemoryBudget("75%"), Copying())
    for part in copies[0].modules():
        assert not any("recollect" in type(thing).__module__ for thing in vars(part).values())
    copies[0].training_step(next(iter(loader(1))), 0).backward()


class Failing(pl.Callback):
    def on_train_batch_end(self, runs: pl.Trainer, *_: Any) -> None:
        if runs.global_step == 2:
            raise FloatingPointError


def test_an_error_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    module = Automatic()
    with pytest.raises(FloatingPointError):
        fit(tmp_path, MemoryBudget("75%"), Failing(), module=module)
    assert not any("recollect" in str(vars(part).get("forward")) for part in module.modules())
    assert "training_step" not in vars(module)


def test_a_model_of_hugging_face_makes_no_cache_until_the_end(tmp_path: Path) -> None:
    caches: list[Any] = []

    class Asking(Automatic):
        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            out = self.model(**batch)
            caches.append(out.past_key_values)
            return out.loss

    module = fit(tmp_path, MemoryBudget("75%"), module=Asking(), max_epochs=1)
    assert caches == [None] * 6
    assert module.model.config.use_cache is True


def test_layers_that_recompute_by_themselves_are_refused(tmp_path: Path) -> None:
    module = Automatic()
    module.model.model.layers[0].gradient_checkpointing = True
    with pytest.raises(AlreadyAppliedError, match="Hugging Face's gradient checkpointing"):
        fit(tmp_path, MemoryBudget("75%"), module=module)


class Elsewhere(SingleDeviceStrategy):
    """One that no release has."""


class ByHand(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_other_ways_to_several_devices_are_refused_by_name(tmp_path: Path) -> None:
    several = trainer(str(tmp_path), devices=2, strategy="ddp_spawn")
    text = r"got strategy='DDPStrategy', automatic_optimization=False: not yet: .* Leave backward and the optimizer"
    with pytest.raises(NotYetError, match=text):
        MemoryBudget("1GiB").setup(several, ByHand(), "fit")
    MemoryBudget("1GiB").setup(several, ByHand(), "validate")
    MemoryBudget("1GiB").setup(several, Automatic(), "fit")
    text = r"got strategy='Elsewhere', devices=1: not yet: .* Pass strategy=\"ddp\""
    with pytest.raises(NotYetError, match=text):
        fit(tmp_path, MemoryBudget("1GiB"), strategy=Elsewhere(torch.device("cpu")))


def test_an_old_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "__version__", "2.3.9")
    with pytest.raises(ConfigError, match=r"got lightning='2.3.9': .* Install 2.4 or later"):
        fit(tmp_path, MemoryBudget("75%"))


def test_the_callback_is_of_the_package_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(MemoryBudget, pl.Callback) and MemoryBudget is integration.MemoryBudget
    with pytest.raises(AttributeError, match="has no attribute 'MemoryBudgets'"):
        integration.MemoryBudgets  # noqa: B018
    monkeypatch.setattr(integration, "_PACKAGES", ("no_such_package.callbacks",))
    with pytest.raises(
        MissingPackageError, match=r"MemoryBudget needs the package `lightning`, which is not installed"
    ):
        integration._budget_class.__wrapped__(())


_OTHER_PACKAGE = """
import sys, warnings
import pytorch_lightning as pl
from torch import nn, optim, randn
from torch.utils.data import DataLoader
from recollect.integrations.lightning import MemoryBudget

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
    def training_step(self, x, number):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()
    def configure_optimizers(self):
        return optim.AdamW(self.parameters())

budget = MemoryBudget("98%")
quiet = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False)
pl.Trainer(accelerator="cpu", max_steps=3, callbacks=[budget], **quiet).fit(Module(), DataLoader(randn(96, 32), 32))
assert "lightning" not in sys.modules
print(budget.attached.num_steps)
"""


@pytest.mark.long
def test_the_other_package_works_alone(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning")
    command = [sys.executable, "-W", "ignore", "-c", _OTHER_PACKAGE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3"
