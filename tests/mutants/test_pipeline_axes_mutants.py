"""Deliberate faults of experts and of split sequences in a pipeline: each must break the comparison with one device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import jaxpar.model.decoder
import jaxpar.stages
from jaxpar.model.decoder import Decoder
from jaxpar.stages import StagedDecoder
from tests.mutants.test_context_mutants import cut_in_order
from tests.pipeline.test_pipeline_axes import QUICK
from tests.pipeline.test_pipeline_training import check

pytestmark = pytest.mark.proof


def first_stage_only(self, by_stage, honest=StagedDecoder._router_sums):
    def masked(leaf):
        first = reshard(jnp.arange(leaf.shape[1]) == 0, P("pipeline"))
        return leaf * first.reshape(1, -1, *(1,) * (leaf.ndim - 2))

    return honest(self, jax.tree.map(masked, by_stage))


def positions_in_order(self, *rows, honest=Decoder.sequence_info):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxpar.model.decoder, "split_sequence", cut_in_order)
        return honest(self, *rows)


def losses_changed(change, honest=jaxpar.stages.router_losses):
    return lambda model, routing, weights: change(lambda weights: honest(model, routing, weights), weights)


FAULTS = {
    "losses of the routers dropped": (
        jaxpar.stages,
        "router_losses",
        losses_changed(lambda honest, weights: (0.0, honest(weights)[1])),
    ),
    "every row weighs the same in them": (
        jaxpar.stages,
        "router_losses",
        losses_changed(lambda honest, weights: honest(jnp.ones_like(weights))),
    ),
    "routers of the first stage alone reported": (StagedDecoder, "_router_sums", first_stage_only),
    "positions in another order than tokens": (Decoder, "sequence_info", positions_in_order),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_breaks_parity(name, monkeypatch):
    monkeypatch.setattr(*FAULTS[name])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(*QUICK["experts and ring"])
