"""The training loop of diffusers' examples within a memory budget, on a small U-Net and random images.

pip install recollect[trainers]
python examples/diffusers_loop.py
"""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional as F

import recollect


def main() -> None:
    """Train a few steps, and print what was planned."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    unet = UNet2DModel(
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    noise_scheduler = DDPMScheduler()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    unet, optimizer = accelerator.prepare(unet, optimizer)
    # "60%": of what the first step needs without recompute; on a GPU "22GiB", "90% of the device"
    attached = recollect.attach(unet, optimizer, "60%")
    for _ in range(8):
        with accelerator.accumulate(unet):
            images = torch.randn(4, 4, 32, 32, device=accelerator.device)
            noise = torch.randn_like(images)
            times = torch.randint(0, noise_scheduler.config.num_train_timesteps, (4,), device=accelerator.device)
            noisy = noise_scheduler.add_noise(images, noise, times)
            loss = F.mse_loss(unet(noisy, times).sample, noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(attached.report())


if __name__ == "__main__":
    main()
