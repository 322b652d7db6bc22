"""Turn settings of other libraries into plans."""
