"""Turn settings of other libraries into plans, and give their trainers a memory budget."""
