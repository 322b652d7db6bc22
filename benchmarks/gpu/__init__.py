"""Everything that has to be measured on a GPU, as parts of one command: `scripts/gpu`."""
