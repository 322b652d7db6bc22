"""Rules on settings: Megatron's in YAML, flags and the list of arguments in its log; transformers'; DeepSpeed's."""

import json
from pathlib import Path

import pytest

import recollect
from recollect.doctor.rule import Finding
from recollect.errors import DiagnosisError

FUSED = "--transformer-impl transformer_engine --num-layers 32 --hidden-size 4096"
MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
    "1.00 GiB is free. Of the allocated memory 75.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
    "unallocated."
)
ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"

# The rule, and a command line that breaks it.
COMMANDS = {
    "core-attn-fused": f"pretrain_gpt.py {FUSED} --recompute-activations",
    "mlp-and-core-attn": f"pretrain_gpt.py {FUSED} --recompute-granularity selective --recompute-modules core_attn mlp",
    "layernorm-saves-little": f"x.py {FUSED} --recompute-granularity selective --recompute-modules core_attn layernorm",
    "mlp-is-slow": f"x.py {FUSED} --ffn-hidden-size 28672 --recompute-granularity selective --recompute-modules mlp",
    "full-is-slow": "x.py --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "one-huge-region": "x.py --num-layers 32 --pipeline-model-parallel-size 4 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 8",
    "stage-imbalance": "x.py --num-layers 32 --pipeline-model-parallel-size 4 --recompute-granularity full "
    "--recompute-method block --recompute-num-layers 2",
    "fp8-and-recompute": "x.py --fp8-format hybrid --fp8-recipe tensorwise --recompute-granularity selective "
    "--recompute-modules layernorm",
    "logits-large": "x.py --tensor-model-parallel-size 2 --vocab-size 128256 --seq-length 8192 --micro-batch-size 1",
    "router-counts-twice": "x.py --num-experts 8 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "megatron-selective-has-no-method": "x.py --recompute-granularity selective --recompute-method block",
    "megatron-full-needs-method": "x.py --recompute-granularity full --recompute-num-layers 1",
    "megatron-graph-full": "x.py --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--cuda-graph-impl transformer_engine --cuda-graph-scope mlp",
    "megatron-offload-and-recompute": "x.py --num-layers 8 --cpu-offloading-num-layers 2 --recompute-granularity selective",
    "megatron-offload-pipeline": "x.py --num-layers 8 --cpu-offloading-num-layers 2 --pipeline-model-parallel-size 2",
    "megatron-distribute-with-sequence-parallel": "x.py --tensor-model-parallel-size 2 --sequence-parallel "
    "--distribute-saved-activations --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "megatron-stages": "x.py --num-layers 30 --pipeline-model-parallel-size 4 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "megatron-fp8-delayed": "x.py --fp8-format hybrid --recompute-granularity selective --recompute-modules layernorm",
    "megatron-types": "x.py --recompute-granularity full --recompute-method uniform --recompute-num-layers=1 "
    "--min-offloaded-tensor-size big",
}


def rules(*sources: str | Path) -> list[str]:
    return [finding.rule for finding in recollect.diagnose(*sources)]


def found(rule: str, *sources: str | Path) -> Finding:
    (finding,) = (finding for finding in recollect.diagnose(*sources) if finding.rule == rule)
    return finding


@pytest.mark.parametrize("rule", COMMANDS)
def test_command_line(rule: str) -> None:
    assert rule in rules(COMMANDS[rule])


def test_the_same_in_bridge_yaml(tmp_path: Path) -> None:
    path = tmp_path / "bridge.yaml"
    path.write_text(
        "model:\n  recompute_granularity: selective\n  recompute_modules: [core_attn]\n"
        "  transformer_impl: transformer_engine\ntrain:\n  micro_batch_size: 1\n"
    )
    finding = found("core-attn-fused", path)
    assert finding.evidence == (
        f"{path}: recompute_granularity: selective, recompute_modules: core_attn, transformer_impl: transformer_engine",
    )
    path.write_text("model:\n  recompute_granularity: selective\n  recompute_modules: []\n")
    assert rules(path) == ["megatron-empty-modules"]
    # as TransformerConfig sets it where nothing is recomputed
    path.write_text("model:\n  recompute_granularity: null\n  recompute_modules: [core_attn]\n  num_layers: 2\n")
    assert rules(path) == []


@pytest.mark.parametrize(
    ("flags", "is_divided"),
    [
        ("--pipeline-model-parallel-layout 'Et*7|(t*8|)*2t*7L'", True),
        ("--pipeline-model-parallel-layout 'Et*8|(t*8|)*2t*7L'", False),
        (ENDS, True),
        ("--account-for-embedding-in-pipeline-split", False),
        ("--num-layers-in-last-pipeline-stage 6 --decoder-first-pipeline-num-layers 8", True),
        ("--decoder-last-pipeline-num-layers 6 --num-virtual-stages-per-pipeline-rank 4", False),
        ("--num-layers-per-virtual-pipeline-stage 3 --account-for-loss-in-pipeline-split", False),
        (f"{ENDS} --num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2", True),
    ],
)
def test_uneven_stages(flags: str, is_divided: bool) -> None:
    line = f"x.py --num-layers 30 {flags} --pipeline-model-parallel-size 4 --recompute-granularity full"
    assert ("megatron-stages" not in rules(f"{line} --recompute-method uniform --recompute-num-layers 1")) == is_divided


def test_scopes_of_a_roll_configuration_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "roll.yaml"
    path.write_text(
        "actor_train:\n  strategy_args:\n    strategy_config:\n      recompute_granularity: full\n"
        "      recompute_method: uniform\nreference:\n  strategy_args:\n    strategy_config:\n      recompute_num_layers: 1\n"
    )
    finding = found("megatron-full-needs-num-layers", path)
    assert finding.evidence[0].startswith(
        f"{path}: actor_train.strategy_args.strategy_config: recompute_granularity: full"
    )


def test_megatrons_list_of_arguments(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "------------------------ arguments ------------------------\n"
        "  recompute_granularity ........................... selective\n"
        "  recompute_method ................................ None\n"
        "  recompute_modules ............................... ['core_attn', 'layernorm']\n"
        "  transformer_impl ................................ transformer_engine\n"
        "-------------------- end of arguments ---------------------\n"
        f"[rank0]: {MEMORY}\n"
    )
    assert rules(log) == ["memory-full", "layernorm-saves-little"]
    finding = found("layernorm-saves-little", log)
    assert finding.evidence[0].startswith(f"{log}:2: ")
    assert finding.evidence[1].startswith(f"{log}:7: ")


def test_without_a_distributed_optimizer() -> None:
    text = f"torchrun pretrain_gpt.py --tensor-model-parallel-size 8 --num-layers 80 --hidden-size 8192\n{MEMORY}\n"
    assert "optimizer-not-sharded" in rules(text)
    assert "optimizer-not-sharded" not in rules(
        text.replace("--num-layers", "--use-distributed-optimizer --num-layers")
    )


def test_nan_with_fp8() -> None:
    flags = f"{COMMANDS['fp8-and-recompute']}\n"
    assert found("fp8-and-recompute", flags).certainty == "possible"
    nan = " iteration       10/  120000 | lm loss: nan | number of skipped iterations:   0 | number of nan iterations:   1 |\n"
    finding = found("fp8-and-recompute", flags + nan)
    assert finding.certainty == "likely"
    assert "number of nan iterations" in finding.evidence[1]
    full = "--fp8-format hybrid --recompute-granularity full --recompute-method uniform --recompute-num-layers 1\n"
    assert "fp8-and-recompute" not in rules(full)
    text = "AssertionError: Rank 3: found NaN in local grad norm in backwards pass. Device: 3, node: set-zw04\n"
    assert "fp8-and-recompute" in rules(full + text)


def test_local_attention_makes_core_attn_worthwhile() -> None:
    assert rules("x.py --transformer-impl local --recompute-granularity selective") == []


@pytest.mark.parametrize(
    ("layers", "recomputed", "rule"),
    [("{{ layers }}", "1", "full-is-slow"), ("4", "x", "megatron-num-layers-positive")],
)
def test_text_where_a_number_belongs(layers: str, recomputed: str, rule: str) -> None:
    """As in a template, or a typo."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
    assert rule in rules(f"python pretrain_gpt.py --num-layers '{layers}' {full} {recomputed}")


def test_flags_over_several_lines() -> None:
    script = (
        "x.py \\\n  --recompute-granularity selective \\\n  --recompute-modules core_attn \\\n    mlp \\\n  --bf16\n"
    )
    assert found("mlp-and-core-attn", script).evidence[0].startswith("text:2: recompute_granularity: selective, ")
    assert rules("--recompute-granularity=selective --recompute-method='uniform'\n") == [
        "megatron-selective-has-no-method"
    ]


def test_the_runs_of_a_script_are_told_apart() -> None:
    script = (
        "x.py --num-layers 32 --recompute-granularity selective --recompute-modules mlp\n"
        "x.py --num-layers 32 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 | tee log\n"
    )
    assert rules(script) == ["mlp-is-slow", "full-is-slow"]


@pytest.mark.parametrize(
    "line",
    [
        "x.py {full} 1 --tensor-model-parallel-size 2 --distribute-saved-activations 2>&1 | tee log.txt",
        "x.py {full} 1; echo done",
        "ARGS=(x.py {full} 1)",
        "I pass `{full} 1`, with which it is slow.",
        "With {full} 1, it is slow.",
        "It is slow with {full} 1.",
    ],
)
def test_a_flag_ends_where_its_words_end(line: str) -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
    assert rules(line.format(full=full)) == ["full-is-slow"]
    assert rules("x.py --recompute-granularity selective --recompute-modules mlp -tp 2") == ["mlp-is-slow"]


def test_a_switch_before_a_closing_quote_is_on() -> None:
    script = 'options=" \\\n  --num-layers 4 \\\n  --recompute-activations "\nsrun sh -c "x.py ${options}"\n'
    assert rules(script) == ["core-attn-fused"]


def test_a_model_that_is_described_elsewhere_may_have_anything() -> None:
    modules = "--recompute-granularity selective --recompute-modules moe_act mla_up_proj"
    assert rules(f"x.py {modules}") == [], "a recipe's model"
    assert rules(f"x.py {modules} --num-layers $LAYERS --num-experts $EXPERTS") == []
    found = rules(f"x.py {modules} --num-layers 4")
    assert found == ["megatron-moe-act-needs-experts", "megatron-mla-up-proj-needs-mla"]
    assert rules(f"x.py {modules} --num-layers 4 --num-experts $EXPERTS --multi-latent-attention") == []
    assert rules("x.py --recompute-granularity full --recompute-method $HOW --recompute-num-layers 1") == [
        "full-is-slow"
    ]


def test_a_cache_for_generation_is_not_one_for_training() -> None:
    code = "args = TrainingArguments(gradient_checkpointing=True)\nmodel.generate(ids, use_cache=True)\n"
    assert rules(code) == []


def test_settings_in_a_sentence_are_not_taken_for_values() -> None:
    assert rules("use `min_offloaded_tensor_size=1Mi`, and distribute_saved_activations=Truecannot be combined\n") == []


def test_settings_in_python_code() -> None:
    code = 'cfg.model.recompute_granularity = "selective"\ncfg.model.recompute_method = "uniform"\n'
    assert rules(code) == ["megatron-selective-has-no-method"]


def test_roll_has_defaults_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "roll.yaml"
    path.write_text("actor_train:\n  strategy_args:\n    strategy_config:\n      recompute_granularity: full\n")
    assert rules(path) == ["full-is-slow"]


def test_expandable_segments_that_are_set_already() -> None:
    memory = MEMORY.replace("1.00 GiB is reserved", "9.00 GiB is reserved")
    finding = found("memory-fragmented", memory)
    assert finding.certainty == "likely"
    script = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    finding = found("memory-fragmented", script + memory)
    assert finding.certainty == "possible"
    assert finding.evidence[1] == "text:1: export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_comments_and_variables_are_not_settings() -> None:
    script = (
        "python pretrain_gpt.py \\\n  # --recompute-modules layernorm  # avoid\n  --recompute-granularity $MODE \\\n"
    )
    assert rules(script) == []


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("fsdp-checkpoints-twice", {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}),
        ("fsdp-gathers-twice", {"fsdp": "full_shard auto_wrap"}),
        ("reentrant-by-default", {"gradient_checkpointing_kwargs": {"determinism_check": "none"}}),
        ("ready-twice", {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "ddp_find_unused_parameters": True}),
        ("no-input-requires-grad", {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "lora_r": 16}),
        ("metadata-zero3", {"finetuning_type": "lora", "zero_optimization": {"stage": 3}}),
        ("metadata-routing", {"num_local_experts": 8}),
        ("cache-and-checkpointing", {"use_cache": True}),
        (
            "random-state-not-kept",
            {"gradient_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False}},
        ),
    ],
)
def test_training_arguments(rule: str, settings: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"gradient_checkpointing": True, **settings}))
    assert rules(path) == [rule]
    path.write_text(json.dumps({"gradient_checkpointing": False, **settings}))
    assert rules(path) == []


def test_settings_of_several_files_are_judged_together(tmp_path: Path) -> None:
    accelerate, arguments = tmp_path / "accelerate.yaml", tmp_path / "args.yaml"
    accelerate.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: true\n")
    arguments.write_text("gradient_checkpointing: true\n")
    assert rules(accelerate) == []
    assert rules(accelerate, arguments) == ["fsdp-checkpoints-twice"]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"cpu_checkpointing": True}, ["deepspeed-section-alone"]),
        ({"contiguous_memory_optimization": True}, ["deepspeed-clash", "deepspeed-section-alone"]),
        ({"number_checkpoints": 100}, ["deepspeed-clash", "deepspeed-section-alone"]),
    ],
)
def test_deepspeed(section: dict[str, object], expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": section}))
    assert rules(path) == expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"activation_checkpoint": "memory_budget"}, ["torchtitan-budget-needs-compile"]),
        ({"activation_checkpoint": "memory_budget", "components": '["loss"]'}, ["torchtitan-budget-needs-compile"]),
        ({"activation_checkpoint": "memory_budget", "components": '["model"]'}, ["compile-budget"]),
        (
            {"activation_checkpoint": "selective", "components": '["model", "loss"]'},
            ["torchtitan-selective-and-compile"],
        ),
        ({"activation_checkpoint": "selective", "training": "true"}, ["torchtitan-selective-and-compile"]),
        ({"activation_checkpoint": "selective"}, []),
        ({"activation_checkpoint": "full", "components": '["model"]'}, []),
    ],
)
def test_torchtitan(job: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "llama3_8b.toml"
    compiles = f"enable = true\ncomponents = {job['components']}" if "components" in job else "enable = false"
    path.write_text(
        f"# a job\n[training]\nseq_len = 8192\ncompile = {job.get('training', 'false')}\n\n[compile]\n{compiles}\n"
        f"[activation_checkpoint]\nmode = '{job['activation_checkpoint']}' # of the blocks\n"
    )
    assert rules(path) == expected
    assert rules(path.read_text()) == expected, "without its name"
    path.write_text("[activation_checkpoint\n")
    with pytest.raises(DiagnosisError, match=r"llama3_8b\.toml: got malformed TOML \(.+\), expected sections"):
        recollect.diagnose(path)
