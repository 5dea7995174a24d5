"""Compiler options of a step by the kind of its mesh: one table, measured with the compiler. No JAX.

``scripts/compiler_options.py`` measures again; its results stand in docs/compile.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.schema import Config

Option = bool | int | float | str

PLAIN: Mapping[str, Option] = {
    # Moving the reduce-scatters to the next iteration takes from the gathers the products that would hide them.
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF",
}
"""GPUs, weights gathered block by block (fsdp, expert or context above 1), no tensor and no data axis."""

WITH_TENSOR: Mapping[str, Option] = {
    **PLAIN,
    # Merged with a weight's gradient, the sequence's reduce-scatter would wait for it.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
}
"""The same with a tensor axis.

With a data axis (hybrid sharding) the compiler's own choice is best: it hides the reduce-scatter of the head behind the
all-reduces over data.
"""

WITH_CONTEXT: Mapping[str, Option] = {
    # In the ring's backward pass keys and gradients travel at once; by default the second permute waits for the first.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
"""Besides, on any mesh with a context axis."""


def table_options(mesh: Mapping[str, int], platform: str) -> dict[str, Option]:
    """The table's options for a mesh; on the CPU there are none."""
    if platform == "cpu":
        return {}
    is_gathered = any(mesh[axis] > 1 for axis in ("fsdp", "expert", "context"))
    gathers = WITH_TENSOR if mesh["tensor"] > 1 else PLAIN
    return {**(gathers if is_gathered and mesh["data"] == 1 else {}), **(WITH_CONTEXT if mesh["context"] > 1 else {})}


def asked_options(config: Config) -> dict[str, Option | None]:
    """``runtime.compiler_options`` as name -> value; None for "default", which takes an option out of the table.

    Raises:
        ConfigError: An entry is not NAME=VALUE.
    """
    wrong = [entry for entry in config.runtime.compiler_options if not all(entry.partition("="))]
    if wrong:
        message = f"{', '.join(map(repr, wrong))}: not NAME=VALUE"
        remedy = (
            'write e.g. ["xla_gpu_enable_latency_hiding_scheduler=false"], or "NAME=default" for the compiler\'s own'
        )
        raise ConfigError([Problem(key="runtime.compiler_options", message=message, remedy=remedy)])
    pairs = (entry.split("=", 1) for entry in config.runtime.compiler_options)
    return {name.strip(): _value(text.strip()) for name, text in pairs}


def _value(text: str) -> Option | None:
    if text == "default":
        return None
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
