"""How sharp the tests are: faults to put into a copy of the sources one by one, and which tests notice (`scripts/mutate`)."""
