"""Rules of recomputation: what is kept exists, is kept once, and has somewhere to go."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.families import FAMILIES
from jaxpar.plan.facts import Facts


def saved_activations_exist(facts: Facts) -> Iterator[Problem]:
    """Every name in train.remat_save is an activation of the family, given once."""
    save = facts.config.train.remat_save
    repeated = {name for name in save if save.count(name) > 1}
    if repeated:
        yield Problem(
            key="train.remat_save",
            value=list(save),
            message=f"names {', '.join(sorted(repeated))} more than once",
            remedy="name each activation once",
        )
    if "gate" in save and not FAMILIES[facts.model.family].gated_mlp:
        yield Problem(
            key="train.remat_save",
            value=list(save),
            message=f"names gate, but the MLP of {facts.model.family} has none",
            remedy="leave gate out; up is the MLP's wide product",
        )


def offload_needs_a_host(facts: Facts) -> Iterator[Problem]:
    """Fake CPU devices are in host memory already."""
    if facts.config.runtime.cpu_devices:
        yield from offload_objection(facts.config.train.remat, "cpu")


def offload_objection(remat: str, platform: str) -> Iterator[Problem]:
    """Why a platform cannot run a remat mode, if it cannot."""
    if remat == "offload" and platform == "cpu":
        yield Problem(
            key="train.remat",
            value=remat,
            message="moves activations from GPU memory to host memory; CPU devices have only the latter",
            remedy='"selective" keeps the same activations without moving them, "full" keeps the least',
        )
