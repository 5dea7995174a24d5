"""What the rules look at: the config, the device count if known, and the mesh as far as it can be resolved."""

from __future__ import annotations

import dataclasses
import math

from jaxpar.config.dims import with_derived_dims
from jaxpar.config.schema import AXES, BYTE_VOCAB_SIZE, TOKENIZED_SOURCES, Config, ModelConfig

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that split the rows of a batch."""

EMBED_AXES = ("fsdp", "expert", "context")
"""Mesh axes that split the embed dim of every weight matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Inputs of every rule. Unknown facts are None, and rules that need them wait."""

    config: Config
    """With the model's dimensions derived."""
    num_devices: int | None
    """Devices of all processes."""
    num_rows: int | None
    """Rows of one training epoch."""
    tokenizer_vocab_size: int | None
    """Ids of the tokenizer whose text is trained on."""
    mesh: dict[str, int]
    """Axes whose size is known and at least 1; a -1 that can be resolved is."""
    is_planned: bool = False
    """Whether the devices are those of ``jaxpar plan``, which only exist on paper."""

    @property
    def model(self) -> ModelConfig:
        """The model, dimensions derived."""
        return self.config.model

    def axes_product(self, axes: tuple[str, ...]) -> int | None:
        """Devices of several axes together; None if one of them is not known."""
        if any(axis not in self.mesh for axis in axes):
            return None
        return math.prod(self.mesh[axis] for axis in axes)

    def describe_axes(self, axes: tuple[str, ...]) -> str:
        """E.g. "data 2 x fsdp 4 x expert 1"."""
        return " x ".join(f"{axis} {self.mesh[axis]}" for axis in axes)

    @property
    def is_device_count_set(self) -> bool:
        """Whether the config itself says how many devices there are."""
        return self.config.runtime.cpu_devices > 0

    @property
    def configured_num_devices(self) -> int:
        """Devices that the config asks for on the CPU."""
        return self.config.runtime.cpu_devices * self.config.runtime.num_processes


def gather_facts(
    config: Config,
    *,
    num_devices: int | None = None,
    num_rows: int | None = None,
    tokenizer_vocab_size: int | None = None,
) -> Facts:
    """Derives what follows from the config; never raises for a config that is wrong.

    Args:
        config: As loaded, or made in Python.
        num_devices: Devices of all processes; None if not known. With ``runtime.cpu_devices`` the config says it.
        num_rows: Rows of one training epoch; None if not known. At most ``data.num_samples`` for the synthetic source.
        tokenizer_vocab_size: Ids of the tokenizer; None if not known. The byte tokenizer's is known.
    """
    model = with_derived_dims(config.model)
    is_bytes = config.data.tokenizer == "bytes" and config.data.source not in TOKENIZED_SOURCES
    if tokenizer_vocab_size is None and is_bytes and config.data.source != "synthetic":
        tokenizer_vocab_size = BYTE_VOCAB_SIZE
    if model.vocab_size == 0:
        vocab_size = tokenizer_vocab_size or (BYTE_VOCAB_SIZE if is_bytes else 0)
        model = dataclasses.replace(model, vocab_size=vocab_size)
    config = dataclasses.replace(config, model=model)
    if num_devices is None and config.runtime.cpu_devices:
        num_devices = config.runtime.cpu_devices * config.runtime.num_processes
    if num_rows is None and config.data.source == "synthetic":
        num_rows = config.data.num_samples
    return Facts(
        config=config,
        num_devices=num_devices,
        num_rows=num_rows,
        tokenizer_vocab_size=tokenizer_vocab_size,
        mesh=_known_axes(config, num_devices),
    )


def _known_axes(config: Config, num_devices: int | None) -> dict[str, int]:
    given = {axis: getattr(config.mesh, axis) for axis in AXES}
    known = {axis: size for axis, size in given.items() if size >= 1}
    rest = [axis for axis in AXES if axis not in known]
    product = math.prod(known.values())
    can_resolve = len(rest) == 1 and given[rest[0]] == -1 and num_devices is not None and num_devices >= product
    if can_resolve and num_devices % product == 0:
        known[rest[0]] = num_devices // product
    return {axis: known[axis] for axis in AXES if axis in known}
