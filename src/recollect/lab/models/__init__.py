"""Reference transformers that recollect trains, benchmarks and tests itself on."""
