"""What transformers, Accelerate, FSDP, vLLM and offloading print about recompute and memory."""

from __future__ import annotations

from recollect.doctor.passage import TextRule

__all__ = ["LIBRARY_RULES"]

LIBRARY_RULES = (
    TextRule(
        name="fsdp-checkpoints-twice",
        sees="transformers' error about `activation_checkpointing` of FSDP and of the training arguments",
        pattern=r"(?:activation_checkpointing in FSDP config and the gradient_checkpointing in training arg"
        r"|`?fsdp_config\['activation_checkpointing'\]`? .*training argument can't both be set)",
        problem="Two mechanisms would checkpoint the same layers: FSDP's and the model's.",
        cause="activation_checkpointing is set in the FSDP configuration, and gradient_checkpointing (activation_checkpointing "
        "in newer versions of transformers 5) in the training arguments.",
        fix=("Keep FSDP's: fsdp_config.activation_checkpointing: true, and take the other one out.",),
        source="transformers/trainer.py",
    ),
    TextRule(
        name="fsdp-gathers-twice",
        sees="transformers' warning about a redundant AllGather",
        pattern=r"introduces a redundant AllGather|redundant AllGather (?:operation )?in (?:the )?backward pass",
        problem="FSDP gathers each layer's weights once more than needed in backward.",
        cause="The checkpoint lies around the FSDP unit, so running the layer again gathers its weights again.",
        fix=(
            "Checkpoint inside the FSDP unit: fsdp_config.activation_checkpointing: true instead of gradient_checkpointing.",
            "With FSDP by hand: apply the checkpoint wrapper first, then fully_shard (or FSDP) the wrapped layer.",
        ),
        source="pytorch/pytorch#105635, huggingface/transformers#30404",
    ),
    TextRule(
        name="cache-and-checkpointing",
        sees='"use_cache=True is incompatible with gradient checkpointing", "Caching is incompatible ..."',
        pattern=r"`?use_cache=True`? is incompatible with gradient checkpointing|Caching is incompatible with gradient "
        r"checkpointing",
        problem="The model was asked for a cache of keys and values during training, and switched it off.",
        cause="A layer that runs again would append its keys and values to the cache a second time.",
        fix=("Harmless, but say so yourself: model.config.use_cache = False.",),
        source="transformers/modeling_layers.py",
    ),
    TextRule(
        name="model-without-checkpointing",
        sees='"does not support gradient checkpointing" (or activation checkpointing)',
        pattern=r"ValueError: (?P<model>\w+) (?:does not support|is not compatible with) (?:gradient|activation) "
        r"checkpointing",
        problem="{model} has no gradient checkpointing.",
        cause="Its class does not say supports_gradient_checkpointing, or no module of it has the switch.",
        fix=(
            'recollect needs no support by the model: recollect.attach(model, optimizer, budget="80%").',
            "Or wrap its layers: torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing.",
        ),
        source="transformers/modeling_utils.py",
    ),
    TextRule(
        name="pinned-memory-without-device",
        sees='"Cannot access accelerator device when none is available" where memory is pinned for offload',
        pattern=r"Cannot access accelerator device when none is available|Need to provide pin_memory allocator",
        near=r"pin_memory|save_on_cpu|offload",
        problem="Offloading pins host memory, and this machine has no device to pin it for.",
        cause="offload=True (pin_memory=True) needs CUDA or another accelerator; on a CPU there is nothing to offload to.",
        fix=("Leave offloading out on a CPU, or pass pin_memory=False.",),
        source="transformers offload=True on a CPU; torch.Tensor.pin_memory",
    ),
    TextRule(
        name="slow-pinned-allocation",
        sees="cudaHostAlloc with its share of the time, in a profiler's table",
        pattern=r"\bcudaHostAlloc\b\s+(?P<share>\d[\d.]*)\s*%",
        problem="{share} % of the time goes into cudaHostAlloc: pinned host memory is allocated again and again.",
        cause="Offloading without a pool allocates each buffer anew, about 3 ms a tensor; that took 49.6 % of a step, and "
        "22 % with a pool.",
        fix=(
            "Reuse pinned buffers: PyTorch's pool (under torch.compile, from 2.12 on), or Megatron's "
            "--cpu-offloading-retain-pinned-cpu-buffers.",
            "Offload fewer, larger tensors, on a stream of their own.",
            'Or recompute instead: recollect.attach(model, optimizer, budget="80%").',
        ),
        source="pytorch/pytorch#186161, #174436",
    ),
    TextRule(
        name="expandable-segments-and-pool",
        sees='"Expandable segments are not compatible with memory pool" (vLLM)',
        pattern=r"Expandable segments are not compatible with memory pool",
        problem="expandable_segments:True was set for a process that uses a CUDA memory pool.",
        cause="vLLM's sleep mode (CuMemAllocator) and NCCL's user buffers need pools, which expandable segments do not allow.",
        fix=(
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for the training process only.",
            "In one process: torch.cuda.memory._set_allocator_settings('expandable_segments:False') before vLLM starts, and on "
            "again after.",
        ),
        source="pytorch/pytorch#147851",
    ),
    TextRule(
        name="host-out-of-memory",
        sees='"DefaultCPUAllocator: can\'t allocate memory"',
        pattern=r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (?P<size>\d+) bytes",
        problem="The host's memory is full, not the device's: {size} bytes more were refused.",
        cause="Offloaded activations, optimizer state or data workers fill it, or the tensor is larger than meant.",
        fix=("Offload less, or recompute instead: recompute needs no host memory.", "Use fewer data workers."),
        source="c10/core/impl/alloc_cpu.cpp",
    ),
    TextRule(
        name="checkpoint-inside-checkpoint",
        sees="a layer that checkpoints inside a CheckpointWrapper, in a traceback",
        pattern=r"(?:modeling_layers\.py|_gradient_checkpointing_func)",
        near=r"checkpoint_wrapper\.py\", line \d+,? in forward",
        problem="Layers are checkpointed twice, one checkpoint inside the other.",
        cause="apply_activation_checkpointing (or FSDP's activation_checkpointing) wrapped layers of a model whose own "
        "gradient checkpointing is on: each layer then runs three times forward, and nothing says so.",
        fix=("Switch one off: model.gradient_checkpointing_disable(), or do not wrap.",),
        source="measured with PyTorch 2.13 and transformers 5.23",
        certainty="likely",
    ),
)
