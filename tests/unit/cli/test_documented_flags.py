"""Each command line in the guides that users follow is understood, or refused with a reason."""

import os
import shlex
import warnings
from pathlib import Path

import pytest

from command_lines import DOCUMENTED, commands_in
from recollect.cli.entry import parse_train
from recollect.cli.train import training_config
from recollect.errors import RecollectError
from recollect.lab.train.config import TrainConfig

# Refused, as a part of the line: what is not there yet, and what Megatron refuses too.
REFUSED = {
    "selective --recompute-method": r"recompute_granularity='selective', recompute_method='uniform'",
    "mla_up_proj": r"the model has no up-projection from latents|a model without experts has no moe_act",
}
# Lines that say nothing of the model, which Megatron refuses without the rest of a command line.
NEEDS = {
    "selective --recompute-modules moe_act": "--num-experts 8",
    "selective --recompute-modules core_attn moe_act": "--num-experts 8",
    "--recompute-granularity full": "--recompute-method block --recompute-num-layers 1",
}


def parse(command: str) -> TrainConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about lines without a granularity; test_recompute_flags has them
        return training_config(parse_train(shlex.split(command)))


def test_documented_command_lines() -> None:
    for command in DOCUMENTED:
        refusal = next((reason for part, reason in REFUSED.items() if part in command), None)
        if refusal is not None:
            with pytest.raises(RecollectError, match=refusal):
                parse(command)
            continue
        for part, rest in NEEDS.items():
            if part in command and rest.split()[0] not in command:
                with pytest.raises(RecollectError):
                    parse(command)
                command += f" {rest}"
        config = parse(command)
        says_recompute = "--recompute" in command and "None" not in command
        assert (config.step.recompute is not None) == says_recompute, command


def test_the_values_of_a_whole_line_arrive() -> None:
    line = next(command for command in DOCUMENTED if "--hidden-size 12288" in command)
    config = parse(line)
    model = config.model.dimensions(seq_length=config.data.seq_length)
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads) == (
        96,
        12288,
        49152,
        96,
    )
    assert (config.optim.batch_size, config.data.seq_length, model.max_position_embeddings) == (1, 2048, 2048)
    assert config.step.recompute.modules == ("core_attn", "mlp")


def test_commands_are_found_in_a_guide() -> None:
    guide = """
Text with `--one flag` and a name, `--two`, and no command.
```bash
python pretrain_gpt.py \\
    --num-layers 2 \\  # a comment
    # another
    --swiglu \\
    ...
```
Then:
```bash
--a 1 \\
--b  # Default
# --c 3
--d 4 \\
```
"""
    assert list(commands_in(guide)) == ["--one flag", "--num-layers 2 --swiglu", "--a 1 --b", "--d 4"]


@pytest.mark.skipif("RECOLLECT_GUIDES" not in os.environ, reason="needs RECOLLECT_GUIDES, a folder of guides")
def test_no_command_line_of_the_guides_is_missing() -> None:
    guides = sorted(Path(os.environ["RECOLLECT_GUIDES"]).iterdir())
    assert list(dict.fromkeys(command for path in guides for command in commands_in(path.read_text()))) == DOCUMENTED
