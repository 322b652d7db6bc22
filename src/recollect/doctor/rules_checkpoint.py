"""What `torch.utils.checkpoint`, autograd and distributed training print when recompute goes wrong."""

from __future__ import annotations

from recollect.doctor.passage import TextRule

__all__ = ["CHECKPOINT_RULES"]

_TAPE = 'Or recompute op by op, without running the module again: recollect.attach(model, optimizer, budget="80%").'
_HF_KWARGS = 'gradient_checkpointing_kwargs={{"use_reentrant": False}}'

CHECKPOINT_RULES = (
    TextRule(
        name="no-input-requires-grad",
        sees='"None of the inputs have requires_grad=True"',
        pattern=r"None of the inputs have requires_grad=True",
        problem="A checkpointed layer gets no gradients: no tensor that goes in needs one.",
        cause="Reentrant checkpointing sees only its inputs. With a frozen base model (LoRA), the output of the embedding does "
        "not require a gradient, so the whole layer is treated as if it did not, adapters included.",
        fix=(
            "Call model.enable_input_require_grads() before training.",
            f"Or pass use_reentrant=False; with transformers: {_HF_KWARGS}.",
        ),
        source="huggingface/transformers#42489, #26334; huggingface/trl#3089, #2486",
    ),
    TextRule(
        name="no-grad-fn",
        sees='"element 0 of tensors does not require grad"',
        pattern=r"element \d+ of tensors does not require grad and does not have a grad_fn",
        problem="Backward has nothing to do: the loss does not depend on anything that requires a gradient.",
        cause="All weights on the way to the loss are frozen, or reentrant checkpointing cut the graph because no input of the "
        "first layer requires a gradient (LoRA on a frozen base).",
        fix=(
            "With LoRA or another adapter: model.enable_input_require_grads(), or use_reentrant=False; with transformers: "
            f"{_HF_KWARGS}.",
            "Else check that some parameter requires a gradient, and that the step does not run under torch.no_grad().",
        ),
        source="huggingface/transformers#42489, #26334",
        certainty="likely",
    ),
    TextRule(
        name="nothing-to-checkpoint",
        sees='"none of output has requires_grad=True, this checkpoint() is not necessary"',
        pattern=r"none of output has requires_grad=True",
        problem="The output of a checkpointed function does not require a gradient, so its backward cannot run.",
        cause="What runs inside is frozen, or returns detached tensors only.",
        fix=("Do not checkpoint frozen parts.", "If it should be trained: look for detach() or no_grad() inside."),
        source="torch/utils/checkpoint.py",
    ),
    TextRule(
        name="ready-twice",
        sees='"Expected to mark a variable ready only once" (DDP)',
        pattern=r"Expected to mark a variable ready only once",
        problem="DDP saw the gradient of one parameter finished twice in a step.",
        cause="Reentrant checkpointing runs a backward of its own for each region. A parameter used by two regions, or "
        "find_unused_parameters=True, then marks it ready twice.",
        fix=(
            f"Pass use_reentrant=False; with transformers: {_HF_KWARGS}.",
            "Set find_unused_parameters=False (ddp_find_unused_parameters: false).",
            "If reentrant must stay and the graph is the same each step: DistributedDataParallel(..., static_graph=True).",
        ),
        source="huggingface/peft#313, huggingface/accelerate#389, pytorch/pytorch#24005",
    ),
    TextRule(
        name="reentrant-by-default",
        sees='the warning "the use_reentrant parameter should be passed explicitly"',
        pattern=r"the use_reentrant parameter should be",
        problem="torch.utils.checkpoint was called without use_reentrant, and took the old, reentrant implementation.",
        cause="The default is still reentrant in PyTorch 2.13, whatever the warning announces. It cannot take keyword "
        "arguments, needs an input that requires a gradient, and clashes with DDP and torch.autograd.grad.",
        fix=(f"Always pass it: use_reentrant=False; with transformers: {_HF_KWARGS}.",),
        source="huggingface/transformers#28538, #29638",
    ),
    TextRule(
        name="reentrant-keywords",
        sees='"Unexpected keyword arguments" or "context_fn ... only supported when use_reentrant=False", from checkpoint',
        pattern=r"Passing `context_fn` or `debug` is only supported when|ValueError: Unexpected keyword arguments: ",
        near=r"torch/utils/checkpoint\.py|use_reentrant=False",
        problem="Reentrant checkpointing was given keyword arguments, which it cannot pass on.",
        cause="Only the non-reentrant implementation takes keywords, context_fn and debug; without use_reentrant, the "
        "reentrant one is chosen.",
        fix=("Pass use_reentrant=False to torch.utils.checkpoint.checkpoint.",),
        source="torch/utils/checkpoint.py",
    ),
    TextRule(
        name="reentrant-and-grad",
        sees='"incompatible with .grad() or passing an `inputs` parameter", in Megatron "not compatible with .grad()"',
        pattern=r"torch\.utils\.checkpoint is incompatible with \.grad\(\)|Checkpointing is not compatible with \.grad\(\)",
        problem="torch.autograd.grad, or backward(inputs=...), ran through a reentrant region.",
        cause="A reentrant region accumulates into .grad of its parameters and cannot return gradients. In Megatron, capture "
        "of CUDA graphs by Transformer Engine calls it on recomputed modules.",
        fix=(
            "Pass use_reentrant=False, or call loss.backward().",
            "In Megatron: leave the recomputed module out of cuda_graph_modules, or set cuda_graph_impl to none.",
        ),
        source="NVIDIA/Megatron-LM#2758; torch/utils/checkpoint.py",
    ),
    TextRule(
        name="number-of-tensors",
        sees='"A different number of tensors was saved", "trying to save more tensors during recomputation"',
        pattern=r"A different number of tensors was saved|trying to save more tensors during recomputation",
        problem="A checkpointed region saved other tensors when it ran again than the first time.",
        cause="Its code took another branch: it depends on state that changed since (a counter, a cache, a compiled graph that "
        "was replaced, mixed precision that is off in backward).",
        fix=(
            "Make the region a function of its inputs; save what it reads from outside before it runs.",
            "With torch.compile: compile the module with the checkpoint inside it, compile(checkpoint(f)), not the other way.",
            "Run once with torch.utils.checkpoint.set_checkpoint_debug_enabled(True): it prints the ops of both runs.",
            _TAPE,
        ),
        source="pytorch/pytorch#166926; torch/utils/checkpoint.py",
    ),
    TextRule(
        name="unpacked-twice",
        sees='"Unpack is being triggered for a tensor that was already unpacked once"',
        pattern=r"Unpack is being triggered for a tensor that was already",
        problem="Backward of a custom autograd Function read ctx.saved_tensors twice inside a checkpointed region.",
        cause="What is recomputed is handed out once, and freed.",
        fix=("In that backward, read ctx.saved_tensors once into variables.", _TAPE),
        source="torch/utils/checkpoint.py",
    ),
    TextRule(
        name="selective-mutated",
        sees='"Tensor cached during selective activation checkpoint has been mutated"',
        pattern=r"Tensor cached during selective activation checkpoint has been mutated",
        problem="A tensor that a selective policy saves was changed in place afterwards.",
        cause="The policy holds the tensor itself, so an in-place op (add_, relu_, masked_fill_, an in-place residual) spoils "
        "it. Some ops write in place inside, such as dropout on the CPU.",
        fix=(
            "Use the out-of-place op after the saved one.",
            "Or do not save that op; only if the write repeats itself exactly, allow_cache_entry_mutation=True.",
            _TAPE,
        ),
        source="NVIDIA-NeMo/Automodel#3274",
    ),
    TextRule(
        name="selective-not-found",
        sees='"encountered during backward but not found in storage"',
        pattern=r"encountered during backward but not found in",
        problem="A selectively checkpointed region ran other ops when it ran again than the first time.",
        cause="Saved results are found by the count of each op. One op more or less shifts the rest: a branch, a profiler's "
        "ranges, a graph recompiled in between, or FSDP's gathers inside the region.",
        fix=(
            "Keep profiling, logging and data-dependent branches out of the region, and compile before the first step.",
            "With FSDP: checkpoint inside the wrapped unit, not around it.",
            _TAPE,
        ),
        source="pytorch/torchtitan#3427; torch/utils/checkpoint.py",
    ),
    TextRule(
        name="selective-backward-twice",
        sees='"only allowed to backward once on any region computed under selective activation checkpoint"',
        pattern=r"Trying to backward an extra time\. You are only allowed to backward once",
        problem="Backward ran twice through a selectively checkpointed region.",
        cause="Saved results are freed when they are read, so retain_graph=True does not work there.",
        fix=("Sum the losses and call backward once, or use plain checkpointing for that region.", _TAPE),
        source="torch/utils/checkpoint.py",
    ),
    TextRule(
        name="compile-context-fn",
        sees='"checkpoint not implemented for ... context_fn" under torch.compile',
        pattern=r"checkpoint not implemented for .*context_fn",
        problem="torch.compile cannot see into the policy of a selective checkpoint.",
        cause="context_fn is a lambda or a function inside a function.",
        fix=(
            "Pass a function of the module, or functools.partial(create_selective_checkpoint_contexts, policy).",
            "Compile around the checkpoint, compile(checkpoint(f)): the other way it is slow or saves little.",
        ),
        source="pytorch/pytorch#161889; pytorch/torchtitan#1631, #1683",
    ),
    TextRule(
        name="compile-inside-checkpoint",
        sees="a checkpoint around torch.compile, in code",
        pattern=r"checkpoint(?:_wrapper)?\(\s*(?:function=)?torch\.compile\(",
        problem="torch.compile lies inside the checkpoint, where the two work against each other.",
        cause="The compiler then sees neither the checkpoint nor its policy: selective checkpointing is slow or saves little, "
        "and a graph that is recompiled in between makes the recompute fail.",
        fix=("Compile around it: torch.compile(checkpoint(f)); for a layer, wrap it first, then compile it.",),
        source="pytorch/pytorch#161889, #166926; pytorch/torchtitan#1631, #1683",
        certainty="likely",
    ),
    TextRule(
        name="random-state-not-kept",
        sees="preserve_rng_state=False, in code or settings",
        pattern=r"preserve_rng_state['\"]?\s*[=:]\s*(?:False|false)",
        problem="With preserve_rng_state=False, dropout inside a checkpoint draws another mask in backward.",
        cause="Gradients are then of another function than the loss, and nothing says so.",
        fix=(
            "Leave it out, unless nothing inside is random.",
            'recollect draws the same numbers again: recollect.attach(model, optimizer, budget="80%").',
        ),
        source="torch/utils/checkpoint.py; measured with PyTorch 2.13",
        certainty="possible",
    ),
    TextRule(
        name="random-state-of-one-device",
        sees='the warning "Tensor arguments, excluding CPU tensors, are detected on at least two types of devices"',
        pattern=r"excluding CPU tensors, are detected on at least two types of devices",
        problem="A checkpointed region works on two kinds of devices, and the random state of only one is kept.",
        cause="Dropout on the other device draws another mask in backward.",
        fix=("Put the region's tensors on one kind of device, or make separate regions.",),
        source="torch/utils/checkpoint.py",
    ),
    TextRule(
        name="device-state-initialized",
        sees='"device state was initialized in the forward pass of a Checkpoint"',
        pattern=r"device state was initialized in the forward pass",
        problem="The device was first used inside a checkpointed region.",
        cause="Its random state did not exist when the region began, so it cannot be restored.",
        fix=("Use the device before: torch.cuda.init(), or move the model there first.",),
        source="torch/utils/checkpoint.py",
    ),
    TextRule(
        name="selective-offload",
        sees="MUST_CPU_OFFLOAD or PREFER_CPU_OFFLOAD, in code",
        pattern=r"CheckpointPolicy\.(?P<policy>MUST_CPU_OFFLOAD|PREFER_CPU_OFFLOAD)",
        problem="The policy {policy} does not offload anything: without torch.compile the op is recomputed.",
        cause="Eager selective checkpointing tells only the two SAVE policies apart (PyTorch 2.13).",
        fix=("Offload with torch.autograd.graph.save_on_cpu(pin_memory=True) around what should be offloaded.",),
        source="pytorch/pytorch#196956; measured with PyTorch 2.13",
    ),
    TextRule(
        name="compile-budget",
        sees="activation_memory_budget set, in code or settings",
        pattern=r"activation_memory_budget\W{1,3}[=:]?\s*(?P<budget>0?\.\d+|0\b)",
        problem="activation_memory_budget={budget} bounds what is saved between forward and backward, not the peak.",
        cause="It is a fraction of what one compiled graph would save. What is recomputed in backward is not counted, so a "
        "smaller budget can have a higher peak: 0.05, 0.10, 0.15, 0.20, 0.30 gave 1145, 508, 275, 325, 411 MB.",
        fix=(
            "Measure the peak at several values (torch.cuda.max_memory_allocated), and compile layer by layer.",
            'For a bound on the peak itself: recollect.attach(model, optimizer, budget="80%").',
        ),
        source="pytorch/pytorch#197838",
        certainty="likely",
    ),
    TextRule(
        name="changed-in-place",
        sees='"has been modified by an inplace operation"',
        pattern=r"one of the variables needed for gradient computation has been modified by an inplace operation",
        problem="A tensor that backward needs was overwritten after it was used.",
        cause="An in-place op, a buffer updated in forward, or state that a recomputed region updates a second time.",
        fix=(
            "Find the op with torch.autograd.set_detect_anomaly(True), and write to a copy.",
            "If it appears only with checkpointing: move updates of state (running statistics, expert loads, caches) out of "
            "the region, or skip them when it runs again.",
        ),
        source="NVIDIA-NeMo/Automodel#3247; torch/autograd",
        certainty="likely",
    ),
    TextRule(
        name="endless-backward",
        sees="one `backward` of torch/utils/checkpoint.py calling itself again and again, in a dump of a stack",
        pattern=r"torch/utils/checkpoint\.py\", line \d+,? in backward",
        near=r"(?s:(?:torch/utils/checkpoint\.py\", line \d+,? in backward.*?){6})",
        problem="Backward of a reentrant checkpoint calls itself without end.",
        cause="The region returns one of the model's parameters (such as a bias that is added later): it is no leaf after "
        "that, and its gradient leads back into the region. megatron-core 0.16.1 does so when it recomputes mlp with a bias.",
        fix=(
            "Do not return parameters from a checkpointed function, or pass use_reentrant=False.",
            "In Megatron: --disable-bias-linear, or leave mlp out of --recompute-modules.",
        ),
        source="measured with PyTorch 2.13 and megatron-core 0.16.1",
        certainty="likely",
    ),
)
