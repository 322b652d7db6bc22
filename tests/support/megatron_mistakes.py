"""What `attach` says to models and optimizers of Megatron's that do not belong together: a line for each, with its name."""

# ruff: noqa: E402, megatron-core is imported after what answers in place of CUDA

import sys
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / "megatron_script"), str(Path(__file__).parents[2] / "benchmarks")]

import megatron_core_shim as shim

shim.install()
shim.start()

import megatron.core
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron.training.training import setup_model_and_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect.attaching import megatron_core
from recollect.errors import RecollectError

(CHUNK,), OPTIMIZER, _ = setup_model_and_optimizer()
MODEL, CONFIG = CHUNK.module.module, CHUNK.config


def attach(name: str, models: list[Any], optimizer: Any = OPTIMIZER, **settings: Any) -> None:
    before = {key: getattr(CONFIG, key, None) for key in settings}
    vars(CONFIG).update(settings)
    try:
        recollect.attach(models, optimizer, "80%", log=lambda line: None).remove()
    except RecollectError as error:
        print(f"{name}: {type(error).__name__}: {error}")
    vars(CONFIG).update(before)


# Made without its own `__init__`, which needs CUDA.
sharded = MegatronFSDP.__new__(MegatronFSDP)
nn.Module.__init__(sharded)
sharded.module = MODEL
attach("right", [CHUNK])
attach("DDP", [DistributedDataParallel(MODEL)])
attach("FSDP", [sharded])
attach("optimizer", [CHUNK], setup_model_and_optimizer()[1])
attach("pages", [CHUNK], moe_paged_stash=True)
attach("graphs", [CHUNK], enable_cuda_graph=True)
second = setup_model_and_optimizer()[0][0]
MODEL.vp_stage, second.module.module.vp_stage = 0, 1
attach("order", [second, CHUNK])
attach("one of two", [CHUNK], virtual_pipeline_model_parallel_size=2)
MODEL.vp_stage = None
parallel_state.destroy_model_parallel()
attach("groups", [CHUNK], tensor_model_parallel_size=2)
megatron.core.__version__ = "0.21.0"
megatron_core._warn_of_version.cache_clear()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    attach("right, too", [CHUNK])
    attach("right, again", [CHUNK])
print("versions:", *(str(warning.message) for warning in caught if "megatron-core" in str(warning.message)))
