"""PyTorch's checkpointing, called as always, on recollect's tape; on random numbers.

pip install recollect
python examples/torch_checkpoint.py
"""

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import recollect


def save_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save what matrix products make, as torchtitan does by default."""
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def main() -> None:
    """Run one step in each way, and print its peak."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(128, 1))
    batch = torch.randn(4, 128, 128)

    def peak(forward: nn.Module) -> str:
        measured = recollect.measure_peak(lambda: forward(batch).square().mean().backward())
        return f"{measured.peak_bytes / 2**20:.1f} MiB"

    print("all kept                       ", peak(model))
    print("checkpoint_sequential, 3 parts ", peak(lambda x: recollect.checkpoint_sequential(model, 3, x)))

    chosen = {"check_fn": lambda module: isinstance(module, nn.TransformerEncoderLayer)}
    with recollect.apply_activation_checkpointing(model, **chosen):
        print("layers recomputed              ", peak(model))
    with recollect.apply_activation_checkpointing(model, **chosen, policy_fn=save_products):
        print("layers, but products saved     ", peak(model))

    profile = recollect.record(model, batch, loss_fn=lambda output: output.square().mean())
    plan = recollect.policy_plan(profile, model, batch, save_products)
    print(f"the same as a plan, predicted   {plan.predicted_peak_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
