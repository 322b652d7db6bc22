"""Carries out plans on a running model, with two engines: the tape, and PyTorch's compiler."""
