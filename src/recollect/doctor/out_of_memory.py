"""Out of memory on the device: fragmentation or capacity, by the numbers of the message, and where, by the traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from recollect.byte_format import format_bytes
from recollect.doctor.finding import Certainty, Finding, Rule
from recollect.doctor.memory_message import MemoryMessage
from recollect.doctor.passage import Passage

__all__ = ["MEMORY_RULES", "findings", "is_out_of_memory"]

_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_SIZES_MATTER = 0.05  # of the device; less in other processes is their CUDA context

FRAGMENTED = Rule(
    name="memory-fragmented",
    sees="out of memory, where more is reserved but unallocated (and free) than was asked for",
    problem="Out of memory by fragmentation, not for lack of it: {tried} were asked for, and {room} were in no tensor.",
    cause="{unallocated} of what PyTorch holds is in no tensor, but in pieces each too small for {tried}; {free} were free "
    "on the device. Tensors whose sizes change from step to step leave such pieces.",
    fix=(
        f"export {_EXPANDABLE} before the program starts (PYTORCH_ALLOC_CONF from PyTorch 2.9 on); it costs nothing. "
        "Not in a process with vLLM's sleep mode or NCCL user buffers.",
        "If it is set already: pad batches to few lengths, and call torch.cuda.empty_cache() once after the first step.",
        "Only then recompute more.",
    ),
    source="torchtune#1185 (16.39 to 10.83 GiB), NeMo-RL#2319, SkyRL#1768; Megatron Bridge: Llama 3 70B at 58.8 of 80 GB",
    certainty="likely",
)
CAPACITY = Rule(
    name="memory-full",
    sees="out of memory, where less is free and unallocated than was asked for",
    problem="Out of memory for lack of it: {tried} were asked for, and {short} of that do not exist even without gaps.",
    cause="{allocated} are in tensors; only {room} were left (free on the device, or held by PyTorch in no tensor).",
    fix=(
        'Fit the step into the device: recollect.attach(model, optimizer, budget="{budget}") in the training loop.',
        "Or see first what that costs, without a GPU: recollect plan --hf-config config.json --fake --dtype bf16 "
        "--seq-length {length} --memory-budget {budget}",
        "Weights, gradients and optimizer state are not activations: shard them (FSDP, ZeRO, --use-distributed-optimizer) if "
        "they alone come close.",
        "A smaller micro-batch with more accumulation steps.",
    ),
    source="https://pytorch.org/docs/stable/notes/cuda.html#memory-management",
)
LIMITED = Rule(
    name="memory-limited",
    sees="out of memory, where more was free on the device than was asked for",
    problem="Out of memory although {free} were free on the device, and {tried} were asked for.",
    cause="A limit below the device's size (torch.cuda.set_per_process_memory_fraction), or another process took and freed "
    "the memory meanwhile; under WSL the numbers are of the host.",
    fix=("Look for set_per_process_memory_fraction, and for other processes: nvidia-smi.",),
    source="torch/cuda/memory.py",
    certainty="possible",
)
OTHERS = Rule(
    name="memory-of-others",
    sees="out of memory, with other processes on the device",
    problem="Other processes hold {others} of the device's {capacity}.",
    cause="{names} run on the same device: an earlier run that did not end, an inference engine, or other ranks.",
    fix=(
        "Stop them (nvidia-smi names them), or give this run a device of its own (CUDA_VISIBLE_DEVICES, local rank).",
        "With an inference engine beside it: lower its share (gpu_memory_utilization in vLLM), or let it sleep.",
    ),
    source="the message itself",
)
LOGITS = Rule(
    name="memory-in-logits",
    sees="out of memory in cross-entropy, the LM head or the logits, by the traceback",
    problem="The step runs out of memory at the logits ({tried}).",
    cause="Logits have tokens x vocabulary elements, and the loss holds them up to three times (bf16, fp32, gradient). "
    "Recomputing layers does not make them smaller.",
    fix=(
        "Compute head and loss in chunks: recollect plan --hf-config config.json --fake --dtype bf16 --loss-chunks auto "
        "--memory-budget {budget}",
        "In a loop of your own: recollect.chunked_cross_entropy, or recollect.fit(model, batch, loss_chunks='auto').",
        "Or a fused loss (Liger; --cross-entropy-loss-fusion in Megatron), or more tensor parallelism, which splits them.",
    ),
    source="NVIDIA-NeMo/Automodel#3907, pytorch/torchtitan#996 (7 GiB)",
    certainty="likely",
)
OPTIMIZER = Rule(
    name="memory-at-optimizer-start",
    sees="out of memory inside the optimizer's step, by the traceback",
    problem="The step runs out of memory in the optimizer ({tried}), after forward and backward fitted.",
    cause="Adam allocates its two moments at its first step, 8 bytes a parameter in fp32, and temporaries in each step. A "
    "configuration that survives the first forward need not survive this.",
    fix=(
        "Shard the state (ZeRO, FSDP, --use-distributed-optimizer), offload it, or use an 8-bit optimizer.",
        "Use fused=True, or foreach=False: the foreach implementation needs temporaries of the size of all parameters.",
        "Recompute cannot make it smaller: activations are gone by then. recollect counts it, and says so if no plan fits: "
        'recollect.attach(model, optimizer, budget="{budget}").',
    ),
    source="Megatron Bridge, performance guide: it must survive optimizer start-up; verl-project/verl#3124",
)
RECOMPUTE = Rule(
    name="memory-in-recompute",
    sees="out of memory where a checkpointed region runs again in backward, by the traceback",
    problem="The step runs out of memory while it recomputes in backward ({tried}).",
    cause="Running a region again brings back all of its activations at once, on top of the gradients and of what is kept. "
    "The peak is one region, however many regions there are.",
    fix=(
        "Make regions smaller: one layer each (--recompute-num-layers 1), or modules inside layers.",
        'Let the budget decide value by value: recollect.attach(model, optimizer, budget="{budget}").',
        "See what is alive at the peak: print(recollect.explain_peak(profile, plan)).",
    ),
    source="NVIDIA/Megatron-LM#1300; pytorch/pytorch#147449",
    certainty="likely",
)
LOADING = Rule(
    name="memory-while-loading",
    sees="out of memory while weights are moved or loaded, by the traceback",
    problem="The model's weights alone do not fit ({tried}).",
    cause="It happens before any step, so recompute cannot help.",
    fix=("Shard the weights (FSDP, ZeRO-3, tensor parallelism), load them in bf16, or use another device.",),
    source="the traceback itself",
)
NO_CHECKPOINT = Rule(
    name="checkpointing-without-effect",
    sees="out of memory in a layer's forward with gradient checkpointing on, and no checkpoint in the traceback",
    problem="Gradient checkpointing is switched on, but the layer that ran out of memory was not checkpointed.",
    cause="Most often the model is not in training mode: transformers checkpoints only after model.train(). Else the switch "
    "was set on another model, or this layer does not look at it.",
    fix=(
        "Call model.train() after loading and after each evaluation.",
        "Compare torch.cuda.max_memory_allocated() with and without it; short sequences save little.",
        "recollect reports what it drops: print(attached.report()).",
    ),
    source="huggingface/transformers#28022, deepspeedai/DeepSpeedExamples#332",
    certainty="likely",
)
MEMORY_RULES = (FRAGMENTED, CAPACITY, LIMITED, OTHERS, LOGITS, OPTIMIZER, RECOMPUTE, LOADING, NO_CHECKPOINT)

# Innermost frames first. A step with a closure runs forward and backward inside the optimizer's, so the search ends there.
_PLACES = (
    (
        LOGITS,
        re.compile(
            r"cross_entropy|log_softmax|loss_utils\.py|ForCausalLMLoss|lm_head|\blogits\b.*(?:float|exp|softmax|to\()"
            r"|compute_log_probs|LogitsProcessor|output_layer"
        ),
    ),
    (
        RECOMPUTE,
        re.compile(
            r"(?:utils/checkpoint|tensor_parallel/random|checkpointing)\.py(?:\", line |:)\d+,? in (?:\w+\.)?(?:recompute_fn|"
            r"unpack_hook|backward|inner)\b"
        ),
    ),
    (
        OPTIMIZER,
        re.compile(
            r"torch/optim/(?!lr_scheduler)|_init_group|exp_avg|initialize_optimizer_states|step_with_ready_grads|"
            r"bitsandbytes/optim"
        ),
    ),
    (
        LOADING,
        re.compile(
            r"\bin (?:\w+\.)?(?:_apply|from_pretrained|_load_state_dict\w*|load_checkpoint|set_module_tensor_to_device)\b"
        ),
    ),
)
_END = re.compile(r"closure|training_step|train_step")
_LAYER = re.compile(r"modeling_\w+\.py(?:\", line |:)\d+,? in (?:\w+\.)?forward")
_CHECKPOINT = re.compile(r"checkpoint\w*\.py\"|_gradient_checkpointing_func|_checkpointed_forward")
_FRAME = re.compile(r"^\s*File \"")


def is_out_of_memory(line: str) -> bool:
    """Return whether a line is the message of the CUDA allocator (or HIP's, or XPU's)."""
    return "Tried to allocate" in line and ("out of memory" in line or "OutOfMemoryError" in line)


def findings(
    passage: Passage, *, length: object = 4096, is_checkpointing: bool = False, expandable: str = ""
) -> Iterator[Finding]:
    """Yield what a message says: why memory ran out, and where.

    Args:
        passage: its line is the message.
        length: of a sequence, for the advice.
        is_checkpointing: whether the settings switch gradient checkpointing on.
        expandable: the line that sets expandable segments, which leave few gaps; "" if there is none.

    Yields:
        The place first where it says more than the numbers.
    """
    message = MemoryMessage.of(passage.line)
    if message is None:
        return
    budget = "80%" if message.capacity_bytes is None else _budget(message.capacity_bytes)
    values: dict[str, Any] = {"tried": format_bytes(message.tried_bytes), "budget": budget, "length": length}
    place, frame = _place(passage.traceback)
    if place is not None:
        yield place.finding(passage.quoted(), frame, **values)
    if (reason := _reason(message, (passage.quoted(), *([expandable] if expandable else [])), values)) is not None:
        yield reason
    if message.capacity_bytes is not None:
        others = sum(message.other_processes.values())
        if others > _SIZES_MATTER * message.capacity_bytes:
            names = ", ".join(f"process {pid} ({format_bytes(n)})" for pid, n in message.other_processes.items())
            capacity = format_bytes(message.capacity_bytes)
            yield OTHERS.finding(passage.quoted(), others=format_bytes(others), capacity=capacity, names=names)
    if place is None and is_checkpointing and not any(_CHECKPOINT.search(line) for line in passage.traceback):
        layers = [line for line in passage.traceback if _LAYER.search(line)]
        if layers:
            yield NO_CHECKPOINT.finding(passage.quoted(), f"in {layers[-1].strip().removeprefix('File ')}")


def _budget(capacity: int) -> str:
    """Return 90 % of a device, as people write it: what is left is for the CUDA context and gaps."""
    return f"{capacity * 0.9 / 2**30:.0f}GiB" if capacity >= 10 * 2**30 else f"{capacity * 0.9 / 2**20:.0f}MiB"


def _reason(message: MemoryMessage, evidence: tuple[str, ...], values: dict[str, Any]) -> Finding | None:
    room = message.room_bytes
    if message.free_bytes is None or room is None or message.unallocated_bytes is None:
        return None
    numbers = {
        **values,
        "free": format_bytes(message.free_bytes),
        "room": format_bytes(room),
        "unallocated": format_bytes(message.unallocated_bytes),
        "allocated": "Most" if message.allocated_bytes is None else format_bytes(message.allocated_bytes),
        "short": format_bytes(max(message.tried_bytes - room, 0)),
    }
    if message.free_bytes >= message.tried_bytes:
        return LIMITED.finding(evidence[0], **numbers)
    if room >= message.tried_bytes:
        certainty: Certainty = "possible" if len(evidence) > 1 else "likely"
        return FRAGMENTED.finding(*evidence, certainty=certainty, **numbers)
    return CAPACITY.finding(evidence[0], **numbers)


def _place(traceback: tuple[str, ...]) -> tuple[Rule | None, str]:
    """Return the rule of the innermost frame that has one, and that frame with its line of code."""
    for i in range(len(traceback) - 1, -1, -1):
        line = traceback[i]
        for rule, pattern in _PLACES:
            if pattern.search(line):
                return rule, _frame_at(traceback, i)
        if _FRAME.match(line) and _END.search(line):
            break
    return None, ""


def _frame_at(traceback: tuple[str, ...], i: int) -> str:
    """Return "in FILE, line N, in FUNCTION: CODE" for a line of either kind."""
    start = i if _FRAME.match(traceback[i]) or i == 0 or not _FRAME.match(traceback[i - 1]) else i - 1
    lines = [traceback[start].strip()]
    if _FRAME.match(traceback[start]) and start + 1 < len(traceback) and not _FRAME.match(traceback[start + 1]):
        lines.append(traceback[start + 1].strip())
    return f"in {': '.join(lines).removeprefix('File ')}"
