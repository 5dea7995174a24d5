"""Export to Hugging Face against transformers' own files: the same bytes, a config.json that loads, the same logits."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxpar
from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.chunks import chunk_for_shards
from jaxpar.checkpoint.copying import copy_arrays
from jaxpar.checkpoint.safetensors import TensorDirectory
from jaxpar.checkpoint.safetensors_writer import TensorFilesWriter
from jaxpar.checkpoint.side_files import copy_side_files
from jaxpar.checkpoint.step_writer import NewArray, StepWriter
from jaxpar.checkpoint.views import ExportedTensors, MappedTensors, row_slabs
from jaxpar.config.huggingface import read_model_settings
from jaxpar.config.huggingface_export import write_model_settings
from jaxpar.config.schema import ModelConfig, PrecisionConfig
from jaxpar.hf import hf_ignored, hf_keymap, unpadded_shapes
from jaxpar.model.decoder import Decoder, Numerics
from jaxpar.state import ModelDefinition
from tests.checkpoint.arrays import ArrayReader, whole
from tests.parity.harness import DATA

ORACLES = ("llama", "llama31", "qwen2", "qwen3", "gemma", "gpt2", "mixtral", "qwen3_moe")


def model_of(name):
    return ModelConfig(**read_model_settings(DATA / "hf" / name))


def imported(tensors, model, prefix=""):
    """The view of an oracle's tensors as our parameters."""
    return MappedTensors(
        tensors, hf_keymap(model), shapes=unpadded_shapes(model), ignored=hf_ignored(model), prefix=prefix
    )


def export(name, directory, *, dtype="float32", max_file_bytes=5 * 2**30, max_bytes=3000):
    """Import into arrays, export slab by slab, converting on the way."""
    model = model_of(name)
    with TensorDirectory(DATA / "hf" / name) as tensors:
        mapped = imported(tensors, model)
        params = {name: whole(mapped, name) for name in mapped.types}
    view = ExportedTensors(ArrayReader(params), hf_keymap(model))
    types = {tensor: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)) for tensor, leaf in view.types.items()}
    with TensorFilesWriter(directory, types, max_file_bytes=max_file_bytes) as writer:
        for tensor, leaf in view.types.items():
            for row, box in row_slabs(leaf, max_bytes):
                writer.write(tensor, row, view.read(tensor, box).astype(dtype, copy=False))
        writer.finish()
    original = json.loads((DATA / "hf" / name / "config.json").read_text())
    config = write_model_settings(model, dtype, original=original)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_side_files(DATA / "hf" / name, directory)


@pytest.mark.parametrize("name", ORACLES)
def test_an_exported_oracle_is_the_file_that_transformers_wrote(name, tmp_path):
    export(name, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (DATA / "hf" / name / "model.safetensors").read_bytes()
    assert read_model_settings(tmp_path) == read_model_settings(DATA / "hf" / name)
    export(name, tmp_path / "several", max_file_bytes=100_000)
    with TensorDirectory(DATA / "hf" / name) as theirs, TensorDirectory(tmp_path / "several") as ours:
        assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
        assert ours.types == theirs.types
        assert all(np.array_equal(whole(ours, tensor), whole(theirs, tensor)) for tensor in theirs.types)


@pytest.mark.parametrize(
    "name", ["qwen2", *(pytest.param(n, marks=pytest.mark.proof) for n in ORACLES if n != "qwen2")]
)
def test_an_exported_oracle_has_its_logits(name, tmp_path):
    export(name, tmp_path, max_file_bytes=100_000)
    with np.load(DATA / "hf" / name / "expected.npz") as expected:
        tokens, logits = expected["tokens"], expected["logits"]
    np.testing.assert_allclose(np.asarray(jaxpar.from_hf(tmp_path)(tokens)), logits, atol=1e-4)


@pytest.mark.parametrize("name", ORACLES)
def test_unpadded_shapes_are_those_of_the_model(name):
    model = dataclasses.replace(model_of(name), vocab_multiple=1)
    definition = ModelDefinition(lambda rngs: Decoder(model, Numerics.of(PrecisionConfig()), rngs))
    built = flatten_dict(definition.abstract_params)
    assert unpadded_shapes(model) == {path: leaf.shape for path, leaf in built.items()}
    assert unpadded_shapes(dataclasses.replace(model, vocab_multiple=128)) == unpadded_shapes(model)


def test_another_dtype(tmp_path):
    export("llama31", tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    with TensorDirectory(DATA / "hf" / "llama31") as theirs, TensorDirectory(tmp_path) as ours:
        for tensor, leaf in ours.types.items():
            assert leaf.dtype == jnp.bfloat16
            assert np.array_equal(whole(ours, tensor), whole(theirs, tensor).astype(jnp.bfloat16))


def test_through_a_checkpoint_on_disk(tmp_path):
    """Slab by slab into an Orbax step and out of it again: the file that transformers wrote."""
    model = model_of("llama31")
    with TensorDirectory(DATA / "hf" / "llama31") as tensors:
        mapped = imported(tensors, model, "params/")
        arrays = {
            name: NewArray(
                leaf.shape, leaf.dtype, chunk_for_shards(leaf.shape, leaf.shape, leaf.dtype.itemsize, 20_000)
            )
            for name, leaf in mapped.types.items()
        }
        writer = StepWriter(tmp_path / "checkpoints", 0, arrays, {}, "llama31")
        copy_arrays(mapped, writer, {}, slab_bytes=50_000)
        writer.close()
        step = writer.publish()
    view = ExportedTensors(StepArrays(step), hf_keymap(model), prefix="params/")
    with TensorFilesWriter(tmp_path / "hf", view.types) as files:
        for tensor, leaf in view.types.items():
            for row, box in row_slabs(leaf, 5000):
                files.write(tensor, row, view.read(tensor, box))
        files.finish()
    theirs = DATA / "hf" / "llama31" / "model.safetensors"
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == theirs.read_bytes()


def test_tensors_of_a_layer_stand_together():
    """So that a file holds whole layers, and a copier reads each layer of our arrays once."""
    model = model_of("qwen2")
    with TensorDirectory(DATA / "hf" / "qwen2") as tensors:
        names = list(ExportedTensors(imported(tensors, model), hf_keymap(model)).types)
    layers = [name.split(".")[2] for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
