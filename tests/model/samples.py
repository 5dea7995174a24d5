"""Random parameters for tests of the decoder, without the initialisers, whose weights are small and long to compile."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.program import Program
from jaxpar.sharding import batch_entry


def sample_params(program: Program, seed: int = 0) -> dict:
    """Parameters on the program's mesh, the same on every mesh; large enough that every token matters.

    Norm scales lie around 1. Padded rows of the vocabulary are not zero: nothing may depend on them.
    """
    rng = np.random.default_rng(seed)

    def sample(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        values = 1 + 0.1 * rng.normal(size=leaf.shape) if name.endswith("norm") else 0.3 * rng.normal(size=leaf.shape)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(sample, program.definition.abstract_on(program.mesh))


class LogitsOf:
    """The decoder of a program as a function of host arrays [B, S]: logits, on the host."""

    def __init__(self, program: Program):
        self.program = program
        self.params = sample_params(program)
        self._compiled = jax.jit(lambda params, *rows: program.definition.bind(params).logits(*rows))

    def __call__(self, tokens: np.ndarray, positions: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
        rows = NamedSharding(self.program.mesh, P(batch_entry(self.program.mesh), None))
        arrays = [jax.device_put(np.asarray(array, np.int32), rows) for array in (tokens, positions, segment_ids)]
        with jax.set_mesh(self.program.mesh):
            return np.asarray(self._compiled(self.params, *arrays))
