"""Code shared by the commands: consoles for tables, and flags without effect."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recollect.cli.commands import ModelStep
from recollect.cli.common import build_step, warn_of_model_flags, wide_console
from recollect.lab.train.model_flags import ModelFlags


@pytest.mark.parametrize(
    ("is_terminal", "width", "expected"), [(True, 60, 80), (True, 100, 100), (True, 200, 200), (False, 60, 120)]
)
def test_tables_have_room_for_their_columns(is_terminal: bool, width: int, expected: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal)
    assert wide_console(console, 120).width == expected


def test_flags_of_the_model_beside_one_of_hugging_face(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16}))
    flags = ModelStep(model=ModelFlags(num_layers=2), hf_config=config, seq_length=4)
    with pytest.warns(
        UserWarning, match=r"^--hf-config describes the whole model: other flags of the model are without"
    ) as told:
        build_step(flags, torch.device("cpu"))
    assert len(told) == 1
    warn_of_model_flags(ModelFlags(make_vocab_size_divisible_by=128))
