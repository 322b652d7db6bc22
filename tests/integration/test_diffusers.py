"""`attach` in the training loop of diffusers' examples: what clashes with it; test_metered_trainers.py trains."""

from typing import Any

import pytest

pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("accelerate", reason="needs accelerate")
from diffusers_loops import train, transformer, unet  # noqa: E402
from recollect.engine.own_checkpoints import tell_once  # noqa: E402
from recollect.errors import AlreadyAppliedError, ConfigWarning  # noqa: E402


@pytest.mark.parametrize("build", [unet, transformer])
def test_the_models_own_checkpointing_is_refused(build: Any) -> None:
    model = build()
    model.enable_gradient_checkpointing()
    with pytest.raises(
        AlreadyAppliedError, match=r"recomputes already.*call model\.disable_gradient_checkpointing\(\) first"
    ):
        train(model, "95%", "no")
    model.disable_gradient_checkpointing()
    assert train(model, "100%", "no", num_steps=1) == 1


def test_checkpointing_that_is_switched_on_later_has_no_effect() -> None:
    tell_once.cache_clear()
    model = transformer()
    hook = model.register_forward_hook(lambda *_: model.enable_gradient_checkpointing())
    with pytest.warns(ConfigWarning, match="torch.utils.checkpoint has no effect"):
        train(model, "100%", "no", num_steps=2)
    hook.remove()
