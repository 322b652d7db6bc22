"""The reference models on many devices: a file per technique, each a function from model and mesh to parallel model."""
