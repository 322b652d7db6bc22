"""The stages of a pipeline: one after the other they are the whole model."""

from dataclasses import replace

import pytest
import torch

from recollect.errors import DataError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.stages import LossStage


@pytest.mark.parametrize("size", ["llama-tiny", "gpt-tiny"])
def test_stages_one_after_the_other_are_the_model(size: str) -> None:
    config = replace(
        NAMED_CONFIGS[size], hidden_dropout=0.0, attention_dropout=0.0, share_embeddings_and_output_weights=False
    )
    whole = GPTModel(config)
    stages = [LossStage(config, layers) for layers in (range(1), range(1, 3), range(3, 4))]
    for first, stage in zip((0, 1, 3), stages, strict=True):
        renamed = {
            name: whole.state_dict()[name.replace(f"layers.{index}.", f"layers.{first + index}.")]
            for name in stage.state_dict()
            for index in [int(name.split(".")[2]) if ".layers." in name else 0]
        }
        stage.load_state_dict(renamed)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden = stages[1](stages[0](tokens))
    assert torch.equal(stages[2](hidden), whole(tokens).logits)
    assert torch.equal(stages[2](hidden, tokens), whole(tokens, tokens).loss)


@pytest.mark.parametrize(("size", "first"), [("mixtral-tiny", 2), ("deepseek-v3-tiny", 2), ("deepseek-v3-tiny", 4)])
def test_stages_with_experts_have_the_gradients_and_counts_of_the_model(size: str, first: int) -> None:
    """The losses of routers in both stages count, and that of the tokens after the next one, with the second embedding.

    The last stage may have no layer but those that predict several tokens.
    """
    torch.manual_seed(0)
    config = replace(NAMED_CONFIGS[size], moe_aux_loss_coeff=0.1)
    whole = GPTModel(config)
    stages = [LossStage(config, range(first), (True, False)), LossStage(config, range(first, 4), (False, True))]
    for number, stage in enumerate(stages):
        state = whole.state_dict()
        stage.load_state_dict({name: state[whole_name(name, number)] for name in stage.state_dict()})
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    stages[1](stages[0](tokens), labels, tokens).backward()
    whole(tokens, labels).loss.backward()
    found: dict[str, torch.Tensor] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            known = whole_name(name, number)
            found[known] = found[known] + parameter.grad if known in found else parameter.grad
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        # The embedding has two gradients here, added up in another order.
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-8)
    for name, buffer in stages[1].named_buffers():
        assert torch.equal(buffer, whole.get_buffer(whole_name(name, 1)))


def whole_name(name: str, stage: int) -> str:
    """The name in the whole model of what a stage of two layers calls `name`."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + 2 * stage)
    return ".".join(parts)


def test_a_last_stage_that_embeds_needs_the_tokens() -> None:
    last = LossStage(NAMED_CONFIGS["deepseek-v3-tiny"], range(3, 4))
    hidden, labels = torch.randn(1, 16, 64), torch.zeros(1, 16, dtype=torch.int64)
    with pytest.raises(DataError, match="tokens: got None, expected token ids"):
        last(hidden, labels)
    assert last.eval()(hidden, labels).isfinite()
