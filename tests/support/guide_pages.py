"""Runs the Python of pages of the documentation as it stands: `python guide_pages.py usage.md`; finds their commands.

Each block runs alone, in an empty folder. What a page takes for granted, such as a model and a batch, is made anew for each
block, and small. On a page of `CONTINUED` a block has the names of the earlier ones, and its output is printed. After an error
the program goes on with the next block. Without a page it serves pages that tests ask for, and imports libraries only once.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import recollect
from case_server import serve

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"(?:^<!-- not run: (.*) -->\n)?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
Names = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A line of a shell on a page; one that is broken by a backslash is one."""

    line: str
    not_run: str
    """Why tests do not run it, as a comment in front of its block says."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def commands(text: str) -> list[Command]:
    found = [(match[1] or "", match[2].replace("\\\n", " ").splitlines()) for match in _SHELL.finditer(text)]
    return [Command(line, reason) for reason, lines in found for line in lines if line]


def blocks(text: str) -> list[tuple[int, str]]:
    """Return each block of Python on a page, with the number of its first line."""
    return [(text[: match.start(2)].count("\n") + 1, textwrap.dedent(match[2])) for match in _BLOCK.finditer(text)]


def training() -> Names:
    """A model of Hugging Face and what its loop needs."""
    from hugging_face_trainers import llama, texts

    model = llama(num_hidden_layers=2).train()
    batches = [{name: torch.stack([one[name] for one in texts(4)]) for name in ("input_ids", "labels")}] * 3
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step() -> None:
        for batch in batches[:2]:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(size: int) -> dict[str, torch.Tensor]:
        # So long that few sizes fit a budget of some GiB, and few are tried.
        tokens = torch.empty(size, 8192, dtype=torch.int64, device="meta")
        return {"input_ids": tokens, "labels": tokens}

    return {
        "model": model,
        "batch": batches[0],
        "batches": batches,
        "loader": batches,
        "optimizer": optimizer,
        "train_step": train_step,
        "make_batch": make_batch,
        "texts": texts(32),
    }


def deep() -> Names:
    """The same, as deep as the page's configuration says; and what Megatron's loop begins with, of other models."""
    from hugging_face_trainers import llama

    model = llama(num_hidden_layers=32, hidden_size=16, intermediate_size=32)
    begun = [model], torch.optim.AdamW(model.parameters()), None
    return {**training(), "model": model, "setup_model_and_optimizer": lambda _: begun}


def planned() -> Names:
    names = training()
    profile = recollect.record(names["model"], names["batch"], fake=True, hardware="H100")
    return {**names, "profile": profile, "plan": recollect.plan(profile, "75%")}


def sentences() -> Names:
    from hugging_face_trainers import llama
    from trl_trainers import answers, tokenizer

    model = llama(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return {**training(), "model": model, "sentences": answers(), "tokenizer": tokenizer()}


def tools() -> Names:
    """The same, with Accelerate, and what starts DeepSpeed; of torchtitan the names only, as its function is not called."""
    import json

    from accelerate import Accelerator

    import deepspeed_engines  # noqa: F401, sets what DeepSpeed reads, and has it compile nothing

    zero = {"stage": 2, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "zero_optimization": zero}
    Path("ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    titan = {"Trainer": SimpleNamespace(Config=object), "llama3_8b": object}
    return {**training(), "accelerator": Accelerator(cpu=True), **titan}


def lightning() -> Names:
    from lightning_trainers import Automatic, loader

    return {"module": Automatic(), "loader": loader(6)}


def sharded() -> Names:
    """The same, on the first of two ranks; the other one is pretended."""
    names = training()
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    names["model"].layers = names["model"].model.layers
    return {**names, "dist": torch.distributed}


def stages() -> Names:
    """Two stages of a pipeline, its schedule, and the profile of a single layer."""
    modules = [nn.Sequential(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))) for _ in range(2)]
    inputs = [torch.randn(256, 16), torch.randn(256, 16, requires_grad=True)]
    layer = recollect.record(
        modules[1], inputs[1], loss_fn=torch.sum, gradients="accumulated", holds_output=False, fake=True
    )
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    return {
        "profiles": [layer, layer],
        "num_stages": 2,
        "device": "cpu",
        "embedding": layer,
        "layer": layer,
        "head": layer,
        "stages": [(modules[0], inputs[0], False), (modules[1], inputs[1], True)],
        "stage": modules[0],
        "stage_index": 0,
        "loss_fn": torch.sum,
        "schedule": recollect.PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4),
    }


def chunked() -> Names:
    """What goes into a loss, and a head of which two ranks, the other one pretended, have half of the words each."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    hidden = torch.randn(32, 8, requires_grad=True)
    return {
        **training(),
        "hidden": hidden,
        "weight": torch.randn(64, 8),
        "labels": torch.randint(0, 64, (32,)),
        "head": nn.Linear(8, 32, bias=False),
        "mesh": torch.distributed.device_mesh.init_device_mesh("cpu", (2,)),
    }


def reference_models() -> Names:
    import safetensors.torch

    from hugging_face_trainers import llama

    folder = Path("path/to/checkpoint")
    folder.mkdir(parents=True)
    model = llama(attention_dropout=0.0)
    model.config.save_pretrained(folder)
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    tokens = torch.randint(0, 256, (2, 32))
    return {"tokens": tokens, "labels": tokens}


CONTINUED = {"../README.md", "bugs_of_others.md", "get_started.md"}
_OF_A_LOOP = "compile coverage cuda_graphs graph hugging_face index largest_batch offload usage".split()
PREPARED: dict[str, Callable[[], Names]] = {
    **dict.fromkeys((*CONTINUED, "megatron_flags.md"), dict),
    **dict.fromkeys((f"{name}.md" for name in _OF_A_LOOP), training),
    **dict.fromkeys(("how_to_read_a_plan.md", "out_of_memory.md", "pictures.md", "which_budget.md"), planned),
    **dict.fromkeys(("fsdp.md", "parallel.md"), sharded),
    "lightning.md": lightning,
    "loss.md": chunked,
    "megatron.md": deep,
    "models.md": reference_models,
    "peft_trl.md": sentences,
    "pipelines.md": stages,
    "trainers.md": tools,
}


def run(page: str, line: int, block: str, names: Names) -> None:
    """Run a block of a page in an empty folder; an error names the line of the page."""
    code = compile("\n" * (line - 1) + block, page, "exec")
    before = Path.cwd()
    quiet = contextlib.nullcontext() if page in CONTINUED else contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, quiet:
        os.chdir(folder)
        try:
            if page not in CONTINUED:
                names |= {"torch": torch, "recollect": recollect, **PREPARED[page]()}
            exec(code, names)
        finally:
            os.chdir(before)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def run_page(page: str) -> dict[str, list[str]]:
    """Run the blocks of a page; return the errors of those that fail."""
    names: Names = {}
    errors = []
    for line, block in blocks((DOCS / page).read_text(encoding="utf-8")):
        try:
            run(page, line, block, names if page in CONTINUED else {})
        except Exception:
            errors.append(traceback.format_exc())
    return {"errors": errors}


def main() -> None:
    if not sys.argv[1:]:
        serve(run_page, searches_are_short=False)
    for page in sys.argv[1:]:
        print(*run_page(page)["errors"], flush=True)
    # A process group's destructor may wait for a thread that waits for the interpreter's lock.
    os._exit(0)


if __name__ == "__main__":
    main()
