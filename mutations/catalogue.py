"""All faults."""

from __future__ import annotations

from mutations import of_offload, of_plans, of_predictions, of_the_engine, of_the_graph_engine, of_tools, of_training

__all__ = ["MUTATIONS"]

MUTATIONS = (
    *of_the_engine.MUTATIONS,
    *of_the_graph_engine.MUTATIONS,
    *of_offload.MUTATIONS,
    *of_predictions.MUTATIONS,
    *of_plans.MUTATIONS,
    *of_training.MUTATIONS,
    *of_tools.MUTATIONS,
)
