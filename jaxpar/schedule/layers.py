"""How the layers of a model are shared out over the virtual stages of a pipeline, evenly or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerSplit:
    """Which layers each stage holds. All virtual stages have ``max_layers`` places; some of them may be padding.

    A padded place repeats a layer of the same virtual stage: its numbers are finite, its result is masked away and its
    gradient is zero.
    """

    counts: np.ndarray
    """int32 [chunks, stages]: layers of each virtual stage, at least 1."""
    layer_of_place: np.ndarray
    """int32 [chunks, stages, max_layers]: the layer, 0 to num_layers - 1, in each place."""

    @property
    def max_layers(self) -> int:
        """Places per virtual stage."""
        return self.layer_of_place.shape[-1]

    @property
    def mask(self) -> np.ndarray:
        """Bool [chunks, stages, max_layers]: True where a place holds a layer, False where it is padding."""
        return np.arange(self.max_layers) < self.counts[..., None]

    @property
    def place_of_layer(self) -> np.ndarray:
        """int32 [num_layers]: the place of each layer, as an index into the flattened ``layer_of_place``."""
        return np.flatnonzero(self.mask).astype(np.int32)

    @property
    def padding_share(self) -> Fraction:
        """Share of all places that is padding. In lock step it is idle time, on top of the schedule's own."""
        return 1 - Fraction(int(self.counts.sum()), self.layer_of_place.size)


def split_layers(
    num_layers: int,
    *,
    num_stages: int,
    num_chunks: int = 1,
    layers_per_stage: Literal["even", "balanced"] | Sequence[int] = "even",
) -> LayerSplit:
    """Shares layers out over stages x chunks, in the order in which a microbatch passes them.

    Args:
        num_layers: Layers of the model.
        num_stages: Stages of the pipeline.
        num_chunks: Chunks of layers per stage.
        layers_per_stage: "even" has the same number everywhere, or is an error. "balanced" gives the first virtual
            stages one layer more than the others. A list has the layers of each virtual stage: of each stage, or, with
            chunks, of chunk 0 on every stage, then of chunk 1 on every stage, and so on.

    Raises:
        ValueError: The layers do not fit; says what is left over and what would work.
    """
    num_virtual = num_stages * num_chunks
    if min(num_layers, num_stages, num_chunks) < 1:
        raise ValueError(f"{num_layers} layers on {num_stages} stages x {num_chunks} chunks: each must be at least 1")
    split = f"{num_stages} stages" + (f" x {num_chunks} chunks" if num_chunks > 1 else "")
    if num_layers < num_virtual:
        raise ValueError(f"{num_layers} layers are fewer than {num_virtual} ({split}); use fewer stages or chunks")
    quotient, remainder = divmod(num_layers, num_virtual)
    if isinstance(layers_per_stage, str):
        if layers_per_stage not in ("even", "balanced"):
            raise ValueError(f"layers_per_stage = {layers_per_stage!r} is not even, balanced or a list")
        if layers_per_stage == "even" and remainder:
            raise ValueError(
                f"{num_layers} layers: {num_layers} not divisible by {num_virtual} ({split}), remainder {remainder}; "
                f'use layers_per_stage = "balanced" ({quotient + 1} layers on {remainder} of them, {quotient} on the '
                "others), a list, or another number of stages"
            )
        counts = [quotient + (virtual < remainder) for virtual in range(num_virtual)]
    else:
        counts = list(layers_per_stage)
        if len(counts) != num_virtual:
            raise ValueError(f"layers_per_stage has {len(counts)} entries, not {num_virtual} ({split})")
        if min(counts) < 1:
            raise ValueError(f"layers_per_stage holds {min(counts)}; every stage needs at least 1 layer")
        if sum(counts) != num_layers:
            raise ValueError(f"layers_per_stage adds up to {sum(counts)}, but the model has {num_layers} layers")
    starts = np.cumsum([0, *counts[:-1]])
    places = [
        [start + min(place, count - 1) for place in range(max(counts))]
        for start, count in zip(starts, counts, strict=True)
    ]
    shape = (num_chunks, num_stages)
    return LayerSplit(
        counts=np.array(counts, np.int32).reshape(shape),
        layer_of_place=np.array(places, np.int32).reshape(*shape, max(counts)),
    )
