"""Which ranks share what, against Megatron's order: tensor innermost, then context, data, pipeline."""

from dataclasses import replace

import pytest

from recollect._torch_parallel import fake_process_group
from recollect.errors import ConfigError
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.parallel.mesh import layout_mesh

EACH_BY_TWO = DeviceLayout(
    pipeline_model_parallel_size=2, data_parallel_size=2, context_parallel_size=2, tensor_model_parallel_size=2
)


@pytest.mark.parametrize(
    ("experts", "expert", "replicas"), [(1, [5], [1, 3, 5, 7]), (2, [5, 7], [1, 5]), (4, [1, 3, 5, 7], [5])]
)
def test_each_rank_is_in_one_group_of_each_kind(experts: int, expert: list[int], replicas: list[int]) -> None:
    layout = replace(EACH_BY_TWO, expert_model_parallel_size=experts)
    with fake_process_group(5, 16):
        mesh = layout_mesh(layout)
        found = {name: view.mesh.tolist() for name, view in vars(mesh).items()}
    assert found == {
        "pipeline": [5, 13],
        "data": [1, 5],
        "context": [5, 7],
        "tensor": [4, 5],
        "gradients": [1, 3, 5, 7],
        "expert": expert,
        "replicas": replicas,
        "sequence": [5, 7],
        "tokens": [1, 3, 5, 7],
    }


@pytest.mark.parametrize(
    ("experts", "expert", "replicas"),
    [(2, [4, 5], [1, 3, 5, 7]), (4, [4, 5, 6, 7], [1, 5]), (8, [0, 1, 2, 3, 4, 5, 6, 7], [5])],
)
def test_whole_experts_are_shared_by_the_ranks_of_tensor_parallelism_first(
    experts: int, expert: list[int], replicas: list[int]
) -> None:
    layout = replace(
        EACH_BY_TWO, sequence_parallel=True, expert_model_parallel_size=experts, expert_tensor_parallel_size=1
    )
    with fake_process_group(5, 16):
        mesh = layout_mesh(layout)
        assert mesh.expert.mesh.flatten().tolist() == expert and mesh.replicas.mesh.tolist() == replicas
        assert mesh.sequence.mesh.tolist() == [4, 5, 6, 7] and mesh.tokens.mesh.tolist() == [*range(8)]
        assert mesh.gradients.mesh.tolist() == [1, 3, 5, 7]


def test_experts_may_be_shared_by_some_of_the_ranks_of_a_sequence() -> None:
    layout = DeviceLayout(context_parallel_size=4, expert_model_parallel_size=2, data_parallel_size=2)
    with fake_process_group(6, 8):
        mesh = layout_mesh(layout)
        assert mesh.context.mesh.tolist() == [4, 5, 6, 7]
        assert mesh.expert.mesh.tolist() == [6, 7]
        assert mesh.replicas.mesh.tolist() == [0, 2, 4, 6]


def test_another_number_of_processes_is_refused() -> None:
    with fake_process_group(0, 3), pytest.raises(ConfigError, match="world_size=3: the layout has 2 devices"):
        layout_mesh(DeviceLayout(data_parallel_size=2))
