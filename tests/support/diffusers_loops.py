"""The training loop of diffusers' examples on tiny random models: noise is added, predicted, and compared."""

import functools
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

import recollect
from metered_trainers import NUM_STEPS, Case, StepPeaks

BATCH, SIZE = 4, 16


def unet(*, large: bool = False) -> Any:
    """A U-Net that sees a text in its outer blocks, as Stable Diffusion's does; a large one for timing."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=SIZE,
        layers_per_block=1,
        block_out_channels=(64, 128) if large else (32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def transformer(*, large: bool = False) -> Any:
    """A diffusion transformer that is told a class, which it forgets at random; a large one for timing."""
    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=48 if large else 16,
        in_channels=4,
        out_channels=4,
        num_layers=6 if large else 4,
        sample_size=SIZE,
    )


def predicted(model: nn.Module, noisy: Tensor, times: Tensor) -> Tensor:
    """Call a model on noisy images, with random texts or classes."""
    if isinstance(model, UNet2DConditionModel):
        return model(noisy, times, torch.randn(BATCH, 8, 32)).sample
    classes = torch.randint(0, 1000, (BATCH,))
    return model(noisy, timestep=times, class_labels=classes).sample


def train(
    model: Any, budget: int | str | None, precision: str, peaks: StepPeaks | None = None, num_steps: int = NUM_STEPS
) -> int:
    """Train as the examples do; return how many steps were recorded."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, cpu=True)
    model.train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noise_scheduler = DDPMScheduler()
    model, optimizer = accelerator.prepare(model, optimizer)
    attached = None if budget is None else recollect.attach(model, optimizer, budget, log=lambda line: None)
    torch.manual_seed(1)
    if peaks is not None:
        peaks.begin()
    for _ in range(2 * num_steps):
        with accelerator.accumulate(model):
            images = torch.randn(BATCH, 4, SIZE, SIZE)
            noise = torch.randn_like(images)
            times = torch.randint(0, noise_scheduler.config.num_train_timesteps, (BATCH,))
            noisy = noise_scheduler.add_noise(images, noise, times)
            loss = nn.functional.mse_loss(predicted(model, noisy, times).float(), noise.float(), reduction="mean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if peaks is not None and accelerator.sync_gradients:
            peaks.end()
    return 0 if attached is None else len(attached.recorded_steps)


def _run(build: Any, precision: str, budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
    model = build()
    return model, train(model, budget, precision, peaks)


CASES: dict[str, Case] = {
    "UNet": functools.partial(_run, unet, "no"),
    "DiT in bf16": functools.partial(_run, transformer, "bf16"),
}
