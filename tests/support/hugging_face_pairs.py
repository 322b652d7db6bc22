"""Small models of Hugging Face and of ours that have to compute the same logits."""

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def give_weights(model: nn.Module) -> None:
    """Draw weights that are large enough for each part of a model to matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1 if is_norm else 0))


def tokens_of() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (2, 24))


def assert_same_logits(ours: nn.Module, theirs: nn.Module) -> None:
    """Logits of size 10 in fp32; sums in another order are off by some roundings of 2^-24 each."""
    with torch.no_grad():
        expected = theirs.eval()(tokens_of()).logits
        torch.testing.assert_close(ours.eval()(tokens_of()).logits, expected, rtol=1e-4, atol=1e-4)
