"""Every architecture of the installed transformers, small and random: `python benchmarks/model_zoo.py`."""
