"""The reference models on many devices: one file a technique, each a function from model and mesh to the parallel model."""
