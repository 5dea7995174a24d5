"""How many layers of a model each virtual stage of a pipeline has. No numpy: plans start at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def layer_counts(
    num_layers: int,
    *,
    num_stages: int,
    num_chunks: int = 1,
    layers_per_stage: Literal["even", "balanced"] | Sequence[int] = "even",
) -> list[int]:
    """The layers of each virtual stage, in the order in which a microbatch passes them.

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
    return counts
