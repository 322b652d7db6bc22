"""Check that a run can go through a pipeline. Every process gets the same answer, from the numbers alone."""

from __future__ import annotations

from recollect.errors import ConfigError, NotYetError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.train.config import TrainConfig

__all__ = ["check_pipeline"]


def check_pipeline(config: TrainConfig, dimensions: TransformerConfig, layout: DeviceLayout) -> None:
    """Check that a run can go through a pipeline.

    Args:
        config: the run; its micro-batches divide over data parallelism.
        dimensions: the whole model, whose layers divide.
        layout: with several ranks in the pipeline.

    Raises:
        ConfigError: too few micro-batches, or with several stages a rank no multiple of the ranks.
        NotYetError: a setting that does not go through a pipeline yet.
    """
    ranks = layout.pipeline_model_parallel_size
    _refuse_missing(config, ranks)
    is_interleaved = len(layout.layers_of_stages(dimensions.num_layers)) > ranks
    count = config.optim.num_micro_batches // layout.data_parallel_size
    if count < ranks or (is_interleaved and count % ranks):
        multiple = config.optim.batch_size * layout.data_parallel_size * ranks
        needed = f"a multiple of {ranks} for several stages a rank" if is_interleaved else f"at least {ranks}"
        choose = "a multiple of" if is_interleaved else "at least"
        raise ConfigError(
            settings={
                "global_batch_size": config.optim.batch_size * config.optim.num_micro_batches,
                "micro_batch_size": config.optim.batch_size,
                "pipeline_model_parallel_size": ranks,
            },
            reason=f"each pipeline has {count} micro-batches a step, and needs {needed}",
            advice=f"Choose {choose} {multiple} sequences a step.",
        )


def _refuse_missing(config: TrainConfig, ranks: int) -> None:
    if config.parallel.sharding == "all":
        raise NotYetError(
            settings={"use_torch_fsdp2": True, "pipeline_model_parallel_size": ranks},
            needs="weights that the stages of a pipeline gather for each micro-batch",
            advice="Use use_distributed_optimizer instead: gradients stay whole until the last micro-batch in either case.",
        )
