"""Plans for the stages of a pipeline, by the pipeline's own schedule."""
