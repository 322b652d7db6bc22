"""Training loops as people write them, run under a meter and a budget: `python benchmarks/real_loops.py`."""
