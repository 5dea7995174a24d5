"""Hugging Face checkpoints as models: weights read straight onto a mesh, and a callable for logits."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint.safetensors import TensorDirectory, read_tensors
from jaxpar.config.dims import with_derived_dims
from jaxpar.config.errors import ConfigError
from jaxpar.config.huggingface import read_model_settings
from jaxpar.config.huggingface_export import experts_without_keys
from jaxpar.config.schema import ModelConfig, PrecisionConfig
from jaxpar.families import FAMILIES
from jaxpar.families.keymap import KeyMap, ParamPath
from jaxpar.mesh import make_mesh
from jaxpar.model.decoder import Numerics
from jaxpar.plan.context import sequence_shards
from jaxpar.plan.parameters import dim_sizes
from jaxpar.program import decoder_definition
from jaxpar.sharding import BATCH_AXES, CONTEXT_AXIS, SEQUENCE_AXIS, batch_entry
from jaxpar.state import ModelDefinition


def hf_keymap(model: ModelConfig, names: Collection[str] = ()) -> KeyMap:
    """Where each parameter of a model lies in a Hugging Face checkpoint, to read and to write.

    Args:
        model: the model.
        names: tensors of the checkpoint that is read. Without any in the family's ``prefix`` it is one of the bare
            decoder, such as the published GPT-2, and the map is without the prefix too.

    Raises:
        ConfigError: transformers has no such model.
    """
    if problems := list(experts_without_keys(model)):
        raise ConfigError(problems)
    hf = FAMILIES[model.family].huggingface
    keymap = hf.keymap(model.tie_embeddings)
    if not names or any(name.startswith(hf.prefix) for name in names):
        return keymap
    return {
        path: dataclasses.replace(source, name=source.name.removeprefix(hf.prefix)) for path, source in keymap.items()
    }


def hf_ignored(model: ModelConfig) -> tuple[str, ...]:
    """Patterns of tensors that a checkpoint may hold and that are not read; a tied head's copy is one."""
    ignored = FAMILIES[model.family].huggingface.ignored
    return (*ignored, r"lm_head\.weight") if model.tie_embeddings else ignored


def unpadded_shapes(model: ModelConfig) -> dict[ParamPath, tuple[int, ...]]:
    """Shape on disk of each parameter: as in memory, the vocabulary without its padding. Builds no model."""
    sizes = dim_sizes(model)
    sizes["layer"] = sizes["layers"]
    return {path: source.target_shape(sizes) for path, source in hf_keymap(model).items()}


def hf_params(
    directory: str | os.PathLike[str], model: ModelConfig, definition: ModelDefinition, mesh: Mesh, dtype: str
) -> dict:
    """Parameters of a Hugging Face directory, sharded; each device reads only its own slices.

    Args:
        directory: holds model.safetensors, or an index and its files.
        model: dimensions complete.
        definition: the decoder of ``model``.
        mesh: where the parameters go.
        dtype: of the parameters; stored tensors of another float type are converted.

    Raises:
        CheckpointError: tensors are missing, unexpected or of the wrong shape; all are named.
    """
    with TensorDirectory(directory) as tensors:
        arrays = read_tensors(
            tensors,
            hf_keymap(model, tensors.types),
            flatten_dict(definition.abstract_on(mesh)),
            unpadded={"vocab": model.vocab_size, "layer": model.num_layers},
            dtype=dtype,
            ignored=hf_ignored(model),
        )
    return unflatten_dict(arrays)


def from_hf(
    directory: str | os.PathLike[str], *, dtype: str = "float32", mesh: Mesh | Mapping[str, int] | None = None
) -> HuggingFaceModel:
    """A model with the weights of a Hugging Face directory of safetensors, of any family in ``jaxpar.families``.

    Args:
        directory: holds config.json and the safetensors.
        dtype: of parameters and computation, "float32" or "bfloat16".
        mesh: a mesh from ``jaxpar.mesh.make_mesh``, or sizes such as ``{"fsdp": 2, "tensor": 2}`` for the first
            devices; None is one device.

    Raises:
        ConfigError: config.json describes something that is not supported; names it.
        CheckpointError: see ``hf_params``.
        ValueError: the mesh has more devices than are present, or does not divide the model.
    """
    model = with_derived_dims(ModelConfig(**read_model_settings(directory)))
    if not isinstance(mesh, Mesh):
        mesh = _mesh_of(mesh or {})
    precision = PrecisionConfig(params=dtype, compute=dtype, reduce=dtype)
    definition = decoder_definition(model, Numerics.of(precision))
    return HuggingFaceModel(model, definition, mesh, hf_params(directory, model, definition, mesh, dtype))


def _mesh_of(sizes: Mapping[str, int]) -> Mesh:
    num_devices = math.prod(sizes.values())
    if num_devices > len(jax.devices()):
        raise ValueError(f"mesh {dict(sizes)} has {num_devices} devices, but {len(jax.devices())} are present")
    return make_mesh(sizes, jax.devices()[: max(1, num_devices)])


class HuggingFaceModel:
    """Tokens -> logits. Compiles once per shape of the tokens."""

    def __init__(self, config: ModelConfig, definition: ModelDefinition, mesh: Mesh, params: dict):
        self.config = config
        self.definition = definition
        self.mesh = mesh
        self.params = params
        self._logits = jax.jit(self._compute)

    def __call__(self, tokens: np.ndarray | jax.Array) -> jax.Array:
        """float32 logits [B, S, vocab_size] of int tokens [B, S]; each row is one document.

        Any B and S will do: rows and sequence are padded to what the mesh divides, and the padding is cut off.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"expected int tokens [rows, sequence], got {tokens.dtype} {tokens.shape}")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.config.vocab_size:
            raise ValueError(
                f"token ids must be 0 to {self.config.vocab_size - 1}, got {tokens.min()} to {tokens.max()}"
            )
        rows, length = tokens.shape
        if 0 < self.config.max_positions < length:
            raise ValueError(f"rows have {length} tokens, but model.max_positions is {self.config.max_positions}")
        shards = math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)
        parts = sequence_shards(tensor=self.mesh.shape[SEQUENCE_AXIS], context=self.mesh.shape[CONTEXT_AXIS])
        padding = ((0, -rows % shards), (0, -length % parts))
        padded = np.pad(tokens.astype(np.int32), padding)
        with jax.set_mesh(self.mesh):
            sharded = jax.device_put(padded, NamedSharding(self.mesh, P(batch_entry(self.mesh), None)))
            logits = jax.sharding.reshard(self._logits(self.params, sharded), P())
        return logits[:rows, :length]

    def _compute(self, params: dict, tokens_bs: jax.Array) -> jax.Array:
        decoder = self.definition.bind(params)
        positions = jnp.broadcast_to(
            jnp.arange(tokens_bs.shape[1]), tokens_bs.shape, out_sharding=jax.typeof(tokens_bs).sharding
        )
        segments = jnp.ones_like(tokens_bs)
        full = decoder.numerics.compute == jnp.float32
        with jax.default_matmul_precision("highest" if full else "default"):
            return decoder.logits(tokens_bs, positions, segments)
