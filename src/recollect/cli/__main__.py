"""Run the `recollect` script by `python -m recollect.cli`."""

import sys

from recollect.cli import main

sys.exit(main())
