"""The decoder as a pipeline: gradients and validation of a step whose layers are spread over stages.

``accumulate`` and ``evaluate`` here do what those of ``jaxpar.step`` do on a mesh without stages, with the same
arguments and results, so that optimizer, clipping, metrics and checkpoints do not know that there is a pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from jaxpar import pipeline
from jaxpar.collectives import current_mesh
from jaxpar.config.schema import Config
from jaxpar.loss import hidden_loss, router_losses
from jaxpar.mesh import used_axes
from jaxpar.model.dropout import KEYS
from jaxpar.placement import Placement
from jaxpar.schedule import Schedule, build_schedule, split_layers
from jaxpar.sharding import PIPELINE_AXIS
from jaxpar.state import ModelDefinition
from jaxpar.step import Batch, Metrics, mean_over_tokens
from jaxpar.strategy import FsdpStrategy

LAYERS = "layers"
"""Key of the stacked blocks among the decoder's parameters; the rest is what a pipeline calls its ends."""
_NUMBERS, _PRESENT = "layer_numbers", "present"


@dataclasses.dataclass(frozen=True)
class StagedDecoder:
    """A decoder, a schedule, and where its layers lie."""

    definition: ModelDefinition
    config: Config
    schedule: Schedule
    placement: Placement
    strategy: FsdpStrategy

    @classmethod
    def of(cls, config: Config, definition: ModelDefinition, num_stages: int, strategy: FsdpStrategy) -> StagedDecoder:
        """The pipeline that a legal config asks for."""
        schedule = build_schedule(
            config.pipeline.schedule,
            num_stages=num_stages,
            num_microbatches=config.train.microbatches,
            num_chunks=config.pipeline.chunks,
        )
        num_layers, options = config.model.num_layers, config.pipeline
        split = split_layers(
            num_layers, num_stages=num_stages, num_chunks=options.chunks, layers_per_stage=options.layers_per_stage
        )
        return cls(definition, config, schedule, Placement(split, num_layers + -num_layers % num_stages), strategy)

    def accumulate(self, params: dict, batch: Batch) -> tuple[dict, Metrics]:
        """As ``jaxpar.step.accumulate``: gradients of the mean loss over all tokens, and the means themselves."""
        # Whole weights are used on a replica's own rows.
        replica_axes = ("data",) if self.strategy.name == "full" else ("data", "fsdp")
        replica_axes = used_axes(current_mesh(), replica_axes)
        weights = self.strategy.prepare(self._staged(params), self._staged_axes(), replica_axes)
        given = weights.for_model(weights.differentiated)
        run = pipeline.value_and_grad(
            self.schedule,
            replica_axes=replica_axes,
            sum_dtype=jnp.dtype(self.config.precision.params),
            **self._functions(),
        )
        result = run(given[LAYERS] | self._tables(), _ends(given), dict(batch))
        layer_grads = {name: result.weight_grads[name] for name in params[LAYERS]}
        grads = weights.finish({LAYERS: layer_grads, **result.end_grads})
        grads[LAYERS] = jax.tree.map(self.placement.from_stages, grads[LAYERS])
        sums = {"loss": result.loss + result.aux, **result.sums, **self._router_sums(result.stage_sums)}
        return mean_over_tokens(grads, sums)

    def evaluate(self, params: dict, batch: Batch) -> Metrics:
        """As ``jaxpar.step.evaluate``: sums of cross entropy and tokens, by the forward lanes of the schedule."""
        replica_axes = used_axes(current_mesh(), ("data",))
        run = pipeline.forward(self.schedule, replica_axes=replica_axes, **self._functions())
        staged = self._staged(params)
        _, sums = run(staged[LAYERS] | self._tables(), _ends(staged), dict(batch))
        return {name: sums[name] for name in ("cross_entropy", "tokens")}

    def _staged(self, params: dict) -> dict:
        """Parameters with the layers by stage."""
        return params | {LAYERS: jax.tree.map(self.placement.to_stages, params[LAYERS])}

    def _staged_axes(self) -> dict:
        """Logical axes of ``_staged``."""
        axes = self.definition.logical_axes
        layers = self.definition.abstract_params[LAYERS]
        return axes | {LAYERS: jax.tree.map(lambda _, logical: ("chunks", "stages", *logical), layers, axes[LAYERS])}

    def _tables(self) -> dict:
        """Numbers of layers by stage; with a mask of the places that hold one, if some hold none."""
        split = self.placement.split
        tables = {_NUMBERS: split.layer_of_place} | ({} if split.mask.all() else {_PRESENT: split.mask})
        return {name: reshard(jnp.asarray(table), P(None, PIPELINE_AXIS)) for name, table in tables.items()}

    def _router_sums(self, by_stage: Metrics) -> Metrics:
        """What the stages say about their routers, as ``jaxpar.loss.next_token_loss`` says it."""
        if not by_stage:
            return {}
        routing = jax.tree.map(self.placement.from_stages, by_stage["routing"])
        return {name: value.sum() for name, value in by_stage.items() if name != "routing"} | {"routing": routing}

    def _functions(self) -> dict[str, object]:
        """What ``jaxpar.pipeline`` runs, each on one microbatch."""
        bind, train = self.definition.bind, self.config.train

        def embed(ends: dict, side: Mapping[str, jax.Array]) -> jax.Array:
            return bind(ends).embedded(side["tokens"], side["positions"], side.get(KEYS))

        def stage(weights: dict, x: jax.Array, side: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, dict]:
            weights = dict(weights)
            numbers, present = weights.pop(_NUMBERS), weights.pop(_PRESENT, None)
            decoder = bind({LAYERS: weights})
            info = decoder.sequence_info(side["positions"], side["segment_ids"])
            y, routing = decoder.run_layers(decoder.layers, x, info, side.get(KEYS), numbers, present)
            router_loss, sums = router_losses(decoder.model, routing, side["weights"]) if routing else (0.0, {})
            return y, router_loss, sums

        def loss(ends: dict, y: jax.Array, side: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            decoder = bind(ends)
            options = {"z_loss": train.z_loss, "chunk_tokens": train.loss_chunk_tokens}
            total, weight, sums = hidden_loss(decoder, decoder.finish(y), {}, side, **options)
            return total, {"tokens": weight, **sums}

        return {"embed": embed, "stage": stage, "loss": loss}


def _ends(params: dict) -> dict:
    return {name: leaf for name, leaf in params.items() if name != LAYERS}
