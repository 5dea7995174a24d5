"""Pipeline schedules as data, and how layers are shared out over their stages. No JAX."""

from jaxpar.schedule.build import build_schedule
from jaxpar.schedule.check import ScheduleError, check
from jaxpar.schedule.kinds import KINDS, Kind, closed_form_idle_share, microbatches_below, schedule_problems
from jaxpar.schedule.layers import LayerSplit, split_layers
from jaxpar.schedule.table import NOTHING, Schedule

__all__ = [
    "KINDS",
    "NOTHING",
    "Kind",
    "LayerSplit",
    "Schedule",
    "ScheduleError",
    "build_schedule",
    "check",
    "closed_form_idle_share",
    "microbatches_below",
    "schedule_problems",
    "split_layers",
]
