"""Shows what recollect is busy with, in one line of the terminal, from the second second on."""
