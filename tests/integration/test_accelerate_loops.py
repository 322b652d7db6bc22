"""`attach` in a loop of Accelerate on one device: what `prepare` returns goes in, and training stays the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="needs accelerate")
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

import recollect  # noqa: E402
from hugging_face_trainers import llama, texts  # noqa: E402
from recollect.attaching.attached import Attached  # noqa: E402
from recollect.engine.content import has_same_bits  # noqa: E402
from tiers import long_but  # noqa: E402


@pytest.fixture(autouse=True)
def no_shared_state() -> Iterator[None]:
    """Forget the precision of the last accelerator, which all of a process share."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(
    precision: str, budget: str | None, folder: Path | None = None, engine: Any = "tape"
) -> tuple[Any, Attached | None]:
    """The loop of Accelerate's documentation, with accumulation, clipping, and state that is saved and loaded."""
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, cpu=True)
    model = llama(num_hidden_layers=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    model, optimizer, data, schedule = accelerator.prepare(
        model, optimizer, DataLoader(texts(66), batch_size=4), schedule
    )
    attached = (
        None if budget is None else recollect.attach(model, optimizer, budget, engine=engine, log=lambda line: None)
    )
    torch.manual_seed(3)
    for number, batch in enumerate(data):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number == 5 and folder is not None:
            accelerator.save_state(str(folder))
            accelerator.load_state(str(folder))
    return accelerator.unwrap_model(model), attached


@pytest.mark.parametrize("way", long_but(["bf16 tape"], ["no tape", "bf16 tape", "bf16 graph"]))
def test_weights_are_as_without_a_plan(way: str, tmp_path: Path) -> None:
    precision, engine = way.split()
    plain, _ = train(precision, None)
    model, attached = train(precision, "75%", tmp_path, engine)
    assert attached is not None and attached.plan is not None
    for (name, expected), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert has_same_bits(expected.detach(), got.detach()), name
    # 17 batches: eight pairs, and one alone at the end of the data.
    assert attached.num_steps == 9 and attached.recorded_steps == [0]
    assert len(attached.planned[0].calls) == 2
