"""The names of the package and their homes: for type checkers, and for `__init__.py`, which reads them here."""

from recollect.integrations.megatron.compile import megatron_plan as megatron_plan
from recollect.integrations.megatron.compile import megatron_stage_plans as megatron_stage_plans
from recollect.integrations.megatron.nearest import bridge_lines as bridge_lines
from recollect.integrations.megatron.nearest import megatron_flags as megatron_flags
from recollect.integrations.megatron.nearest import nearest_settings as nearest_settings
from recollect.integrations.megatron.pipeline import model_chunks as model_chunks
from recollect.integrations.megatron.roll import RollCheckpointing as RollCheckpointing
from recollect.integrations.megatron.roll import roll_plan as roll_plan
from recollect.integrations.megatron.roll import roll_recompute_config as roll_recompute_config
from recollect.integrations.megatron.rules import RULES as RULES
from recollect.integrations.megatron.rules import RecomputeConfig as RecomputeConfig
from recollect.integrations.megatron.settings import BlockFull as BlockFull
from recollect.integrations.megatron.settings import NoRecompute as NoRecompute
from recollect.integrations.megatron.settings import Selective as Selective
from recollect.integrations.megatron.settings import TrainingSetting as TrainingSetting
from recollect.integrations.megatron.settings import UniformFull as UniformFull
