"""The sizes of a layout: what divides, and one clear error where something does not."""

from typing import Any

import pytest

from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.lab.models.architectures import deepseek_v3_config, llama_config, mixtral_config
from recollect.lab.parallel.layout import DeviceLayout, ParallelFlags

LLAMA: dict[str, Any] = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 64}
MODEL = llama_config(**LLAMA, num_query_groups=4, ffn_hidden_size=128)


def test_devices_are_counted() -> None:
    layout = DeviceLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=4, data_parallel_size=3)
    layout.check_devices(24)
    with pytest.raises(
        ConfigError, match=r"world_size=8: the layout has 24 devices: pipeline 4 x data 3 x context 1 x tensor 2"
    ):
        layout.check_devices(8)


@pytest.mark.parametrize("name", ["use_distributed_optimizer", "use_torch_fsdp2"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_nothing_is_shared_without_data_parallelism(name: str, tensor: int) -> None:
    flags = ParallelFlags(tensor_model_parallel_size=tensor, **{name: True})
    expected = (
        f"{name}=True: no effect, since there are no ranks of data parallelism to share with. Start {2 * tensor} "
    )
    with pytest.warns(
        ConfigWarning, match=rf"^{expected}processes or more \(torchrun --nproc-per-node\), or leave it out"
    ):
        flags.layout_of(tensor)
    assert flags.layout_of(2 * tensor).data_parallel_size == 2  # without a warning, which would be an error


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0: it counts devices"),
        ({"pipeline_model_parallel_size": -1}, "pipeline_model_parallel_size=-1: it counts devices"),
        ({"data_parallel_size": 0}, "data_parallel_size=0: it counts devices"),
        ({"sequence_parallel": True}, "the sequence is split over the ranks of tensor parallelism"),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "virtual stages are those of a pipeline"),
        ({"num_layers_per_virtual_pipeline_stage": 0, "pipeline_model_parallel_size": 2}, "virtual stages are those"),
        ({"context_parallel_size": 0}, "context_parallel_size=0: it counts devices"),
        (
            {"expert_model_parallel_size": 4, "data_parallel_size": 2},
            "some of the 2 ranks of data and context parallelism",
        ),
        (
            {"expert_model_parallel_size": 3, "data_parallel_size": 3, "context_parallel_size": 2},
            "expert_model_parallel_size=3, data_parallel_size=3, context_parallel_size=2: experts are shared by some of the 6",
        ),
        (
            {"expert_tensor_parallel_size": 3, "tensor_model_parallel_size": 4},
            "expert_tensor_parallel_size=3, tensor_model_parallel_size=4: experts are split over all ranks of tensor",
        ),
        (
            {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
            "sequence_parallel=False: each rank of tensor parallelism sends the tokens of its own part",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceLayout(**sizes)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 3, "num_attention_heads=8, tensor_model_parallel_size=3: 8 is not a multiple of 3. The next"),
        ({}, 8, "num_query_groups=4, tensor_model_parallel_size=8: 4 is not a multiple of 8"),
        ({"ffn_hidden_size": 127}, 2, "ffn_hidden_size=127"),
        (
            {"vocab_size": 65},
            2,
            "vocab_size=65, tensor_model_parallel_size=2: 65 is not a multiple of 2. The next multiple is 66",
        ),
    ],
)
def test_models_that_do_not_divide_are_refused(changes: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceLayout(tensor_model_parallel_size=ranks).check_model(MODEL.changed(**changes))


def test_the_sequence_has_to_divide_where_it_is_split() -> None:
    split = DeviceLayout(tensor_model_parallel_size=4, sequence_parallel=True)
    split.check_model(MODEL, seq_length=64)
    DeviceLayout(tensor_model_parallel_size=4).check_model(MODEL, seq_length=62)
    with pytest.raises(ConfigError, match="seq_length=62, tensor_model_parallel_size=4: 62 is not a multiple of 4"):
        split.check_model(MODEL, seq_length=62)


def test_ranks_that_share_sequences_have_two_chunks_each() -> None:
    layout = DeviceLayout(
        context_parallel_size=2, tensor_model_parallel_size=4, sequence_parallel=True, data_parallel_size=3
    )
    assert layout.num_devices == 24
    layout.check_model(MODEL, seq_length=64)
    with pytest.raises(ConfigError, match="seq_length=62, 2 x context_parallel_size=4: 62 is not a multiple of 4"):
        layout.check_model(MODEL, seq_length=62)
    with pytest.raises(ConfigError, match="seq_length=60, context_parallel_size x tensor_model_parallel_size=8"):
        layout.check_model(MODEL, seq_length=60)


def test_experts_have_to_divide() -> None:
    layout = DeviceLayout(expert_model_parallel_size=3, data_parallel_size=3)
    with pytest.raises(ConfigError, match="num_moe_experts=8, expert_model_parallel_size=3: 8 is not a multiple of 3"):
        layout.check_model(mixtral_config(**LLAMA))
    with pytest.raises(ConfigError, match="num_moe_experts=None, expert_model_parallel_size=3: there are no experts"):
        layout.check_model(MODEL)


def test_layers_are_dealt_out_in_order() -> None:
    assert DeviceLayout(pipeline_model_parallel_size=4).layers_of_stages(8) == tuple(
        range(n, n + 2) for n in (0, 2, 4, 6)
    )
    with pytest.raises(ConfigError, match="num_layers=8, pipeline_model_parallel_size=3"):
        DeviceLayout(pipeline_model_parallel_size=3).check_model(MODEL)
    with pytest.raises(ConfigError, match="4 layers a rank are not a multiple of 3"):
        DeviceLayout(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=3).check_model(MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_ffn_hidden_size": 33, "moe_grouped_gemm": False}, "moe_ffn_hidden_size=33"),
        ({"moe_shared_expert_intermediate_size": 31}, "moe_shared_expert_intermediate_size=31"),
        (
            {"moe_ffn_hidden_size": 8},
            "moe_ffn_hidden_size=8, 8 x tensor_model_parallel_size=16: 8 is not a multiple of 16",
        ),
    ],
)
def test_channels_of_experts_have_to_divide(changes: dict[str, Any], message: str) -> None:
    split = DeviceLayout(tensor_model_parallel_size=2)
    split.check_model(deepseek_v3_config(**LLAMA, num_moe_experts=8))
    with pytest.raises(ConfigError, match=message):
        split.check_model(deepseek_v3_config(**{**LLAMA, "num_moe_experts": 8, **changes}))


def test_whole_experts_are_shared_by_all_ranks_of_tensor_parallelism() -> None:
    whole: dict[str, Any] = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    }
    with pytest.raises(
        NotYetError, match="expert_model_parallel_size=3: not yet: the same whole experts on several ranks"
    ):
        DeviceLayout(**whole, expert_model_parallel_size=3)
    with pytest.raises(
        ConfigError, match="size=6, .* of the 2 ranks of .* and by all of tensor .* divides it, times 2\\."
    ):
        DeviceLayout(**whole, data_parallel_size=2, expert_model_parallel_size=6)
    layout = DeviceLayout(**whole, expert_model_parallel_size=2)
    assert layout.num_devices == 2 and layout.has_whole_experts
    # Their channels and biases are not split; the shared one's are.
    layout.check_model(mixtral_config(**LLAMA, add_bias_linear=True))
    experts = {"num_moe_experts": 8, "moe_ffn_hidden_size": 8}
    layout.check_model(deepseek_v3_config(**LLAMA, **experts))
    with pytest.raises(
        ConfigError, match="moe_shared_expert_intermediate_size=65, tensor_model_parallel_size=2: 65 is no"
    ):
        layout.check_model(deepseek_v3_config(**LLAMA, **experts, moe_shared_expert_intermediate_size=65))


def test_experts_that_are_not_split_yet_are_refused() -> None:
    layout = DeviceLayout(tensor_model_parallel_size=2, data_parallel_size=2, expert_model_parallel_size=2)
    layout.check_model(mixtral_config(**LLAMA))
    with pytest.raises(
        NotYetError, match="add_bias_linear=True, tensor_model_parallel_size=2: not yet: tensor parallelism of experts"
    ):
        layout.check_model(mixtral_config(**LLAMA, add_bias_linear=True))


@pytest.mark.parametrize(
    ("schedule", "ranks", "layers", "message"),
    [
        ("zbv", 2, None, "there is no such schedule. Choose one of 1F1B, GPipe, Interleaved1F1B, LoopedBFS"),
        ("GPipe", 1, None, "a schedule orders the stages of two ranks or more"),
        ("GPipe", 2, 2, "it runs one stage on each rank, and there are 2. Leave"),
        ("Interleaved1F1B", 2, None, "it runs several stages on each rank, and there is one. Set"),
        ("ZBVZeroBubble", 2, 1, "each rank runs two stages alike, and has 4 layers. Leave .* out, or pass 2"),
        ("DualPipeV", 8, None, "each rank runs two stages alike, and has 1 layers. Choose sizes"),
    ],
)
def test_schedules_take_only_some_stages(schedule: Any, ranks: int, layers: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceLayout(
            pipeline_model_parallel_size=ranks,
            pipeline_parallel_schedule=schedule,
            num_layers_per_virtual_pipeline_stage=layers,
        ).layers_of_stages(8)


def test_v_shaped_schedules_run_two_stages_a_rank() -> None:
    layout = DeviceLayout(pipeline_model_parallel_size=2, pipeline_parallel_schedule="ZBVZeroBubble")
    assert layout.layers_of_stages(8) == (range(2), range(2, 4), range(4, 6), range(6, 8))


@pytest.mark.parametrize(
    ("sizes", "more", "message"),
    [
        ((4, 3), {}, r"pipeline_split=\(4, 3\), num_layers=8: the stages have 7 layers together"),
        ((4, 2, 2), {}, "each of two ranks or more runs as many stages"),
        ((), {}, "each of two ranks or more runs as many stages"),
        ((9, -1), {}, "each of two ranks or more runs as many stages"),
        ((8,), {"pipeline_model_parallel_size": 1}, "each of two ranks or more"),
        ((4, 4), {"pipeline_parallel_schedule": "ZBVZeroBubble"}, "each of two ranks or more runs two stages"),
        ((2, 2, 2, 2), {"pipeline_parallel_schedule": "1F1B"}, "it runs one stage on each rank, and there are 2"),
        ((4, 4), {"num_layers_per_virtual_pipeline_stage": 4}, "pipeline_stage=4: both say how many"),
    ],
)
def test_given_splits_are_checked(sizes: tuple[int, ...], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceLayout(**{"pipeline_model_parallel_size": 2, "pipeline_split": sizes, **more}).layers_of_stages(8)


def test_a_given_split_is_taken() -> None:
    layout = DeviceLayout(pipeline_model_parallel_size=2, pipeline_split=(5, 3))
    assert layout.layers_of_stages(8) == (range(5), range(5, 8)) and layout.num_stages(8) == 2
