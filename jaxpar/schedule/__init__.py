"""Pipeline schedules as data, and how layers are shared out over their stages. No JAX.

Names load when they are used: a plan needs no tables, so it starts without numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpar.schedule.build import build_schedule as build_schedule
    from jaxpar.schedule.check import ScheduleError as ScheduleError
    from jaxpar.schedule.kinds import KINDS as KINDS
    from jaxpar.schedule.kinds import Kind as Kind
    from jaxpar.schedule.kinds import closed_form_idle_share as closed_form_idle_share
    from jaxpar.schedule.kinds import microbatches_below as microbatches_below
    from jaxpar.schedule.kinds import schedule_problems as schedule_problems
    from jaxpar.schedule.layers import LayerSplit as LayerSplit
    from jaxpar.schedule.layers import split_layers as split_layers
    from jaxpar.schedule.table import NOTHING as NOTHING
    from jaxpar.schedule.table import Schedule as Schedule

_PUBLIC = {
    "build_schedule": "build",
    "ScheduleError": "check",
    "KINDS": "kinds",
    "Kind": "kinds",
    "closed_form_idle_share": "kinds",
    "microbatches_below": "kinds",
    "schedule_problems": "kinds",
    "LayerSplit": "layers",
    "split_layers": "layers",
    "NOTHING": "table",
    "Schedule": "table",
}
__all__ = [
    "KINDS",
    "NOTHING",
    "Kind",
    "LayerSplit",
    "Schedule",
    "ScheduleError",
    "build_schedule",
    "closed_form_idle_share",
    "microbatches_below",
    "schedule_problems",
    "split_layers",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jaxpar.schedule' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxpar.schedule.{_PUBLIC[name]}"), name)
