"""The laboratory: reference models, a trainer and a benchmark harness, built on the library like any user's code."""
