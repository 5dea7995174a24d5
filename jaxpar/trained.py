"""What a pipeline trains of the trees that it is given: their leaves, specs and sums of gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import HeldWeight, spec_of, vary_over
from jaxpar.sharding import PIPELINE_AXIS, axes_of


@dataclasses.dataclass(frozen=True)
class Trained:
    """A tree taken apart into what has a gradient and what has none.

    Integers have none (masks of padded layers, numbers of layers), nor has a held weight but for its shard.
    """

    leaves: list[jax.Array]
    others: list[jax.Array]
    is_trained: list[bool]
    structure: object

    @classmethod
    def of(cls, tree: object) -> Trained:
        """What is trained, and the rest."""

        def mark(node: jax.Array | HeldWeight) -> object:
            if isinstance(node, HeldWeight):
                return dataclasses.replace(node, shard=True, whole=False)
            return jnp.issubdtype(node.dtype, jnp.floating)

        leaves, structure = jax.tree.flatten(tree)
        is_trained = jax.tree.leaves(jax.tree.map(mark, tree, is_leaf=lambda node: isinstance(node, HeldWeight)))
        return cls(
            [leaf for leaf, trained in zip(leaves, is_trained, strict=True) if trained],
            [leaf for leaf, trained in zip(leaves, is_trained, strict=True) if not trained],
            is_trained,
            structure,
        )

    def tree(self, leaves: list[jax.Array], keep_others: bool = True) -> object:
        """The tree with other values in the trained leaves; the rest as it is, or None."""
        trained, others = iter(leaves), iter(self.others)
        return self.structure.unflatten(
            [next(trained) if is_trained else (next(others) if keep_others else None) for is_trained in self.is_trained]
        )


def manual_part(leaf: jax.Array, axes: tuple[str, ...]) -> P:
    """The part of a leaf's spec that is over ``axes``."""
    spec = spec_of(leaf)
    entries = ([axis for axis in axes_of(entry) if axis in axes] for entry in spec.partitions)
    return P(*(tuple(entry) or None for entry in entries), reduced=spec.reduced & set(axes))


def gradient_specs(tree: object, replica_axes: tuple[str, ...]) -> object:
    """Specs of the gradients of a tree, over the axes that are manual inside."""
    trained = Trained.of(tree)
    specs = [manual_part(leaf, (PIPELINE_AXIS, *replica_axes)) for leaf in trained.leaves]
    for spec in specs:
        known = {*spec.reduced, *(axis for entry in spec.partitions for axis in axes_of(entry))}
        if missing := set(replica_axes) - known:
            raise ValueError(
                f"a weight is neither sharded nor reduced over the replica axes {sorted(missing)}; use defer_reduction"
            )
    return trained.tree([spec.to_ct_spec() for spec in specs], keep_others=False)


def zero_gradient(leaf: jax.Array, dtype: jnp.dtype | None) -> jax.Array:
    """Zeros of the type that the leaf's gradient has, but for ``dtype``."""
    spec = spec_of(leaf)
    zeros = jnp.zeros(leaf.shape, dtype or leaf.dtype, out_sharding=P(*spec.partitions, unreduced=spec.reduced))
    return vary_over(zeros, tuple(jax.typeof(leaf).mat.varying))
