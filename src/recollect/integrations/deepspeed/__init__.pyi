"""The names of the package and their homes: for type checkers, and for `__init__.py`, which reads them here."""

from recollect.integrations.deepspeed.engine import initialize as initialize
from recollect.integrations.deepspeed.section import ActivationCheckpointing as ActivationCheckpointing
from recollect.integrations.deepspeed.section import deepspeed_plan as deepspeed_plan
