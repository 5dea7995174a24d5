"""Rules of the optimizer's settings."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.config.optimizers import OPTIMIZER_SETTINGS, optimizers_with, unused_settings
from jaxpar.plan.facts import Facts


def settings_are_used(facts: Facts) -> Iterator[Problem]:
    """Every setting that is given belongs to the chosen optimizer."""
    optim = facts.config.optim
    for setting in unused_settings(optim):
        yield Problem(
            key=f"optim.{setting}",
            value=getattr(optim, setting),
            message=f'is not a setting of optim.name = "{optim.name}" (those are '
            f"{_listed(OPTIMIZER_SETTINGS[optim.name])})",
            remedy=f"remove optim.{setting}, or choose optim.name from {_listed(optimizers_with(setting))}",
        )


def adamw_lr_has_a_ratio(facts: Facts) -> Iterator[Problem]:
    """Both of muon's learning rates follow one schedule, as multiples of its peak."""
    optim = facts.config.optim
    if optim.name == "muon" and optim.adamw_lr is not None and optim.lr == 0:
        yield Problem(
            key="optim.adamw_lr",
            value=optim.adamw_lr,
            message="is scheduled as a multiple of optim.lr, which is 0",
            remedy="set optim.lr above 0, or remove optim.adamw_lr",
        )


def average_exists(facts: Facts) -> Iterator[Problem]:
    """The average that is to be validated is kept."""
    config = facts.config
    if config.train.eval_params == "ema" and not config.optim.ema_decay:
        yield Problem(
            key="train.eval_params",
            value="ema",
            message="there is no moving average of the parameters: optim.ema_decay is 0",
            remedy='set optim.ema_decay, e.g. to 0.999, or train.eval_params="params"',
        )


def _listed(names: object) -> str:
    return ", ".join(names)
