"""How the layers of a model are shared out over the virtual stages of a pipeline, evenly or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np

from jaxpar.schedule.counts import layer_counts


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

    Arguments and errors: see ``layer_counts``.
    """
    counts = layer_counts(num_layers, num_stages=num_stages, num_chunks=num_chunks, layers_per_stage=layers_per_stage)
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
