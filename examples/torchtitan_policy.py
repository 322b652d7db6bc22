"""torchtitan within a memory budget: what a job would recompute, from its configuration, on any machine.

pip install recollect[trainers] triton
python examples/torchtitan_policy.py
"""

import torch
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.tools.utils import set_default_dtype
from torchtitan.trainer import Trainer

from recollect.integrations.torchtitan import MemoryBudget


def llama3_within_budget() -> Trainer.Config:
    """A job as in a registry of torchtitan's configurations: start it with `--config llama3_within_budget`."""
    job = llama3_8b()
    job.training.local_batch_size, job.training.seq_len = 1, 8192
    job.training.dtype = job.training.mixed_precision_param = "bfloat16"
    job.training.disable_cuda_graphs = True
    job.activation_checkpoint = MemoryBudget.of_job(job, "75GiB", hardware="H100")
    return job


def main() -> None:
    """Do what torchtitan does when it starts such a job, up to the plan, and print it."""
    job = llama3_within_budget()
    job.model_spec.model.update_from_config(config=job)
    with torch.device("meta"), set_default_dtype(torch.bfloat16):
        model = job.model_spec.model.build()
    policy = job.activation_checkpoint.build(dump_folder="")
    policy.apply(model)
    print(policy.plan)


if __name__ == "__main__":
    main()
