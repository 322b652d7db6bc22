"""The flags of the commands, as dataclasses for tyro. Imports no torch: `--help` is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, Suppress, UseAppendAction, arg

from recollect.cli.recompute_flags import RecomputeFlags
from recollect.lab.parallel.layout import ParallelFlags
from recollect.lab.parallel.pipeline_layout import ScheduleName
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.model_flags import ModelFlags
from recollect.lab.train.optim_flags import OptimFlags, at_least, within
from recollect.quantities import parse_bytes

_SUFFIXES = (".csv", ".json", ".md")
# The names are headings of --help.
_Recompute = Annotated[OmitArgPrefixes[RecomputeFlags], arg(name="recompute", prefix_name=False)]
_Model = Annotated[OmitArgPrefixes[ModelFlags], arg(name="model", prefix_name=False)]
_OfFirst = Annotated[int | None, arg(aliases=("--num-layers-in-first-pipeline-stage",))]
_OfLast = Annotated[int | None, arg(aliases=("--num-layers-in-last-pipeline-stage",))]


@dataclass(frozen=True, kw_only=True)
class Command:
    """The flags that all commands have."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class NodeFlags:
    """How devices are connected."""

    devices_per_node: int | None = None
    """Devices in a node; default: 8."""
    adapters_per_node: int | None = None
    """Network adapters of a node, such as 4 for 8 devices; default: one per device."""
    node_link: str | None = None
    """Link between devices of a node, such as "NVLink 4" or "PCIe 5"; default: the usual one of the hardware."""
    network_link: str | None = None
    """Link between nodes, such as "InfiniBand NDR"; default: likewise."""


@dataclass(frozen=True, kw_only=True)
class ClusterFlags(ParallelFlags):
    """With --fake: plan for many devices."""

    pipeline_parallel_schedule: ScheduleName | None = None
    """Order in which ranks run their stages, by torchtitan's names; default: 1F1B, or Interleaved1F1B if a rank has several.
    ZBVZeroBubble and DualPipeV run two on each rank."""
    pipeline_split: Literal["auto"] | tuple[int, ...] | None = None
    """Layers of each stage, such as 19 20 20 21; auto chooses them together with the plans; default: as many in each."""
    decoder_first_pipeline_num_layers: _OfFirst = None
    """Layers of the first rank of the pipeline; default: as many as the others."""
    decoder_last_pipeline_num_layers: _OfLast = None
    """Layers of the last rank of the pipeline, likewise."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Stages that each rank of the pipeline runs in turn."""
    account_for_embedding_in_pipeline_split: FlagCreatePairsOff[bool] = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: FlagCreatePairsOff[bool] = False
    """Count LM head and loss as a layer of the last stage."""
    pipeline_model_parallel_layout: str | None = None
    """What is on each stage, such as 'Et*3|(tt|)*29mL': embedding, transformer layers, multi-token prediction, loss."""
    data_parallel_size: int = 1
    """Ranks with their own micro-batches; in Megatron the rest of the devices."""
    world_size: int | None = None
    """All devices, instead of --data-parallel-size: data parallelism gets those that the other sizes leave."""
    global_batch_size: int | None = None
    """Sequences of a step on all devices; default: four micro-batches a rank of the pipeline, or one without a pipeline."""
    distribute_saved_activations: FlagCreatePairsOff[bool] = False
    """Let each rank of tensor parallelism hold only a part of values that are the same on all of them."""
    pipeline_engine: Literal["torch", "megatron"] = "torch"
    """Pipeline engine: torch's hold receive buffers for all micro-batches, Megatron's free received and sent tensors."""
    node: Annotated[OmitArgPrefixes[NodeFlags], arg(name="node", prefix_name=False)] = field(default_factory=NodeFlags)

    @property
    def is_given(self) -> bool:
        """Whether there is more than one device, or a flag that implies it."""
        return self != ClusterFlags(node=self.node)


@dataclass(frozen=True, kw_only=True)
class Train(Command):
    """Train a language model within a memory budget; Megatron's pretrain_gpt flags work (docs/megatron_flags.md)."""

    demo: bool = False
    """Use the settings of the demo (about three minutes on two CPU cores); other flags override them."""
    config: OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    recompute: _Recompute = field(default_factory=RecomputeFlags)
    """What to recompute, as Megatron's flags, instead of --memory-budget."""


@dataclass(frozen=True, kw_only=True)
class ModelStep:
    """A training step: AdamW on one micro-batch of a language model."""

    model: _Model = field(default_factory=ModelFlags)
    """One of recollect's own models."""
    hf_config: Path | None = None
    """Use the causal language model of a Hugging Face config.json instead; needs transformers."""
    batch_size: Annotated[int | None, arg(aliases=("--micro-batch-size",))] = None
    """Sequences in the micro-batch; default: 1, but for the default model 8, as in recollect train."""
    seq_length: int = 256
    """Tokens in a sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and activations."""
    device: str = "auto"
    """A torch device; auto is cuda if available, else cpu."""

    def __post_init__(self) -> None:
        at_least(self, 1, "seq_length", "batch_size")

    @property
    def num_sequences(self) -> int:
        # One sequence of the default model is so small that recompute can save little next to weights and optimizer.
        is_default = self.model == ModelFlags() and self.hf_config is None
        return self.batch_size or (OptimFlags().batch_size if is_default else 1)


@dataclass(frozen=True, kw_only=True)
class FakeStep(ModelStep):
    """The training step to run, on real or fake tensors."""

    fake: bool = False
    """Use fake tensors: any model in seconds, without its memory; times come from a cost model."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep(FakeStep):
    """The training step to record."""

    hardware: str | None = None
    """With --fake: the hardware to model, such as H100, B200, RTX 4090, or a file written by recollect calibrate; default: this
    machine's GPU if it is known, else H100."""


@dataclass(frozen=True, kw_only=True)
class StepOnEngines(RecordedStep):
    """The training step to record, and what its layers may run on."""

    engine: Literal["tape", "auto", "graph", "compile"] = "tape"
    """What layers run on: the tape; graph: traces of them; auto: traces where the tape's work would show; compile: besides the
    tape torch.compile, which is measured for minutes, or with --fake estimated in seconds (docs/compile.md)."""


@dataclass(frozen=True, kw_only=True)
class MakePlan(Command):
    """Record a training step, choose what to keep and recompute, print the plan and write it to a file."""

    step: OmitArgPrefixes[StepOnEngines] = field(default_factory=StepOnEngines)
    cluster: OmitArgPrefixes[ClusterFlags] = field(default_factory=ClusterFlags)
    memory_budget: str
    """Bound on the peak of the whole step, such as 16GiB, 900MB or 60% of the peak without recompute; of each device."""
    megatron: Path | None = None
    """Start from the flags of Megatron's pretrain_gpt in this file: a launch script, only flags, or YAML of Bridge; other
    flags override them. A command itself may follow -- instead (docs/megatron_flags.md)."""
    host_budget: str = "0"
    """Host memory that values may be copied to in forward and back in backward, such as 64GiB; 0: nothing is offloaded."""
    loss_chunks: Literal["auto"] | int = 1
    """Chunks in which LM head and loss are computed; 1: as in the model, auto: as many as the fastest plan needs."""
    out: Path | None = None
    """File for the plan; default: plan.json here, or plan-2.json and so on if that exists; none if --png or --html asks for a
    picture."""
    write: Literal["megatron", "bridge", "torchtitan"] | None = None
    """Print the settings of a different tool that come nearest to the plan, too: flags of Megatron, lines of a recipe of
    Megatron-Bridge, or a word of torchtitan."""
    png: Path | None = None
    """Draw the memory of the step under the plan to this file; needs matplotlib."""
    html: Path | None = None
    """Likewise, as an interactive page for a browser; needs plotly."""
    largest: Literal["micro-batch", "seq-length"] | None = None
    """Find the largest and the fastest micro-batch, or sequence length, within the budget, and write the plan of the largest;
    records a few sizes, as with --fake."""
    multiple_of: int | None = None
    """With --largest: try only multiples of this; default: 1 for micro-batches, 64 for lengths."""
    max_size: int | None = None
    """With --largest: try no larger size; default: 1048576, or the number of positions in the --hf-config."""

    @property
    def plan_file(self) -> Path | None:
        if self.out is None and (self.png is not None or self.html is not None):
            return None
        names = (Path.cwd() / f"plan{number}.json" for number in ("", *range(-2, -10_000, -1)))
        # A plan for several devices is one file for each, plan.0.json and so on.
        return self.out or next(path for path in names if not any(path.parent.glob(f"{path.stem}.*json")))

    def __post_init__(self) -> None:
        engine = self.step.engine
        if engine != "tape":
            self._expect_none(
                f"--engine {engine}",
                largest="plan the size that it finds without the flag",
                write="settings of other tools are compared on the tape",
            )
        if self.largest is None:
            for name in ("multiple_of", "max_size"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: got {getattr(self, name)} without --largest, expected both or neither.")
            return
        draw, plan = "draw the size that it finds", "plan the size that it finds"
        self._expect_none("--largest", png=draw, html=draw, write=plan)
        if self.loss_chunks == "auto":
            raise ValueError("loss_chunks: got auto with --largest, expected a number.")
        if parse_bytes(self.host_budget):
            self._expect_none("--largest", host_budget=plan)

    def _expect_none(self, given: str, **advice: str) -> None:
        for name, text in advice.items():
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}: got {value} with {given}, expected none: {text}.")


@dataclass(frozen=True, kw_only=True)
class DrawFrontier(Command):
    """Record a training step and show predicted peak against slowdown for every budget, as a table, a PNG or a page."""

    step: OmitArgPrefixes[StepOnEngines] = field(default_factory=StepOnEngines)
    loss_chunks: int = 1
    """Chunks in which LM head and loss are computed; 1: as in the model."""
    host_budget: str = "0"
    """Host memory that values may be copied to in forward and back in backward, such as 64GiB; 0: nothing is offloaded."""
    png: Path | None = None
    """Draw the frontier to this file; needs matplotlib."""
    html: Path | None = None
    """Write an interactive page for a browser, with the memory of each plan over time; needs plotly."""


@dataclass(frozen=True, kw_only=True)
class ShowTimeline(Command):
    """Record a training step, show what is alive at its peak, and write its memory over time for other viewers."""

    step: OmitArgPrefixes[StepOnEngines] = field(default_factory=StepOnEngines)
    memory_budget: str | None = None
    """Bound on the peak of the whole step, such as 16GiB, 900MB or 60% of the peak without recompute; default: no recompute."""
    plan: Path | None = None
    """A plan for that step that recollect plan wrote, instead of --memory-budget."""
    trace: Path | None = None
    """Write a trace for Perfetto (ui.perfetto.dev) to this file, such as step.json."""
    snapshot: Path | None = None
    """Write a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz) to this file, such as step.pickle."""

    def __post_init__(self) -> None:
        if self.plan is not None and self.memory_budget is not None:
            raise ValueError(
                f"memory_budget: got {self.memory_budget} with the plan {self.plan}, expected one of them."
            )


@dataclass(frozen=True, kw_only=True)
class ShowCoverage(Command):
    """Run one training step, and show which layers a setting recomputes or offloads, and why others are not covered."""

    step: OmitArgPrefixes[FakeStep] = field(default_factory=FakeStep)
    recompute: _Recompute = field(default_factory=RecomputeFlags)
    """The setting, as Megatron's flags."""
    plan: Path | None = None
    """A plan for that step that recollect plan wrote, instead of Megatron's flags."""
    gradient_checkpointing: FlagCreatePairsOff[bool] = False
    """With --hf-config: Hugging Face's own switch, instead of Megatron's flags."""
    json: Path | None = None
    """Write all numbers to this file."""

    def __post_init__(self) -> None:
        given = (self.plan is not None, bool(self.recompute.fields()), self.gradient_checkpointing)
        if sum(given) > 1:
            raise ValueError("plan: got several settings, expected a plan, Megatron's flags or gradient_checkpointing.")
        if self.gradient_checkpointing and self.step.hf_config is None:
            raise ValueError("gradient_checkpointing: got it without hf_config, expected both: Hugging Face has it.")


@dataclass(frozen=True, kw_only=True)
class Calibrate(Command):
    """Measure this device in about a minute and write a file for --hardware, to model times on it."""

    device: str = "auto"
    """A torch device; auto is cuda if available, else cpu, with as many threads as PyTorch uses."""
    out: Path = Path("hardware.json")
    """File for the measurements."""
    quick: bool = False
    """Use small tensors and three runs each: takes seconds and gives a rough answer."""


@dataclass(frozen=True, kw_only=True)
class RunMegatron:
    """Run a training script of Megatron-LM within a memory budget, using recollect.attach; all other flags go to the script.

    torchrun --nproc-per-node 8 -m recollect megatron pretrain_gpt.py --recollect-budget 70GiB ...
    """

    script: Positional[Path]
    """The script, such as pretrain_gpt.py; it is not edited."""
    script_flags: Suppress[tuple[str, ...]] = ()
    recollect_budget: str
    """Bound on the peak of the step on each device, such as 70GiB, "90% of the device" or 60% of the peak without recompute."""
    recollect_host_budget: str = "0"
    """Host memory that values may be copied to in forward and back in backward, such as 64GiB; 0: nothing is offloaded."""
    recollect_on_larger: Literal["replan", "warn", "raise"] = "replan"
    """What to do at a step that no plan was made for."""


@dataclass(frozen=True, kw_only=True)
class Tokenize(Command):
    """Tokenize documents into Megatron's indexed dataset (.bin and .idx), for --data-path here and in Megatron."""

    data: tuple[Path, ...] = ()
    """Text files, JSONL files or folders of them; none: the Python standard library's source on this machine."""
    text_field: str = "text"
    """JSONL field with the text."""
    tokenizer: Path | None = None
    """A `tokenizer.json` of the `tokenizers` library; none: one token per byte."""
    output_prefix: Path
    """Path of the dataset, without .bin and .idx."""


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """Measure recompute settings side by side: TFLOP/s, step time, tokens/s and peak memory; compare with stored results.

    The exit status is 1 if a setting is slower or larger than its golden result allows, or no longer fits.
    """

    step: OmitArgPrefixes[ModelStep] = field(default_factory=ModelStep)
    recompute: OmitArgPrefixes[RecomputeFlags] = field(default_factory=RecomputeFlags)
    """One setting, as Megatron's flags."""
    setting: UseAppendAction[tuple[str, ...]] = ()
    """A setting in a few words, such as "selective core_attn,layernorm", "full uniform 4", "memory_budget 60%"; may be
    repeated."""
    settings: Path | None = None
    """A YAML file with a list of settings, each in a few words or as a mapping of Megatron's names."""
    num_microbatches: int = 1
    """Micro-batches per step, with accumulated gradients."""
    rounds: int = 8
    """Rounds in which all settings take turns."""
    memory_limit: str | None = None
    """A peak above this, such as 16GiB, counts as out of memory; settings predicted to exceed it do not run."""
    threads: int | None = None
    """Threads of PyTorch on a CPU; default: PyTorch's choice."""
    golden: Path | None = None
    """Stored results to compare with."""
    threshold: float = 0.05
    """Relative loss of TFLOP/s, or growth of a peak, that counts as a regression."""
    save_golden: Path | None = None
    """Store the results in this file, for --golden."""
    out: tuple[Path, ...] = ()
    """Files for the results, by suffix: .md (the table), .csv and .json (all numbers)."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_microbatches", "rounds")
        if self.threads is not None:  # thousands leave no memory for anything else
            within("threads", self.threads, 1, 1024)
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold: got {self.threshold:g}, expected a fraction between 0 and 1.")
        for path in self.out:
            if path.suffix not in _SUFFIXES:
                raise ValueError(f"out: got {path}, expected a name that ends in {', '.join(_SUFFIXES)}.")


@dataclass(frozen=True, kw_only=True)
class Explain(Command):
    """Show what a Megatron configuration keeps and recomputes, layer by layer, and what a budget of the same peak would."""

    step: OmitArgPrefixes[RecordedStep] = field(default_factory=RecordedStep)
    recompute: OmitArgPrefixes[RecomputeFlags] = field(default_factory=RecomputeFlags)
    yaml: Path | None = None
    """A YAML configuration with Megatron's names, also under `model` as in Megatron-Bridge; flags override it."""
    json: Path | None = None
    """Write all numbers to this file."""
    new_gradients: bool = False
    """Allocate gradients in backward, as PyTorch does with one micro-batch per step. By default they exist all the time, like
    Megatron's gradient buffer."""
    names: bool = False
    """Also list what is kept and recomputed by name."""


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Name what went wrong in a training run, why, and what to do, from its log, its settings, or a memory snapshot.

    The exit status is 0 if something was recognised, 1 if nothing was, 2 if a file cannot be read.
    """

    files: Positional[tuple[Path, ...]] = ()
    """Logs or tracebacks, configurations (YAML, JSON, TOML, scripts with flags), snapshots of torch.cuda.memory._dump_snapshot;
    files of one run are judged together. - or nothing: standard input."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True, kw_only=True)
class Env(Command):
    """Print what a bug report needs: versions, devices, memory, allocators, and the environment variables that matter."""
