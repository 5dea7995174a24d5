"""Writing safetensors piece by piece: the same bytes as the library's own, in any order, and going on after a stop."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.safetensors import DTYPES, TensorDirectory
from jaxpar.checkpoint.safetensors_writer import TensorFilesWriter, plan_files
from tests.checkpoint.arrays import whole

F32 = np.dtype(np.float32)


def types_of(tensors):
    return {name: jax.ShapeDtypeStruct(t.shape, t.dtype) for name, t in tensors.items()}


def write_all(writer, tensors):
    for name, tensor in tensors.items():
        writer.write(name, 0, tensor)


@st.composite
def tensor_sets(draw):
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tensors = {}
    for name in draw(st.lists(st.text('ab.é"\\\n', min_size=1, max_size=4), max_size=5, unique=True)):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        tensors[name] = np.array(rng.integers(0, 2, shape), ndmin=0).astype(dtype)
    return tensors


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_row_ranges_in_any_order_give_the_bytes_of_the_library(data):
    tensors = data.draw(tensor_sets())
    metadata = data.draw(
        st.sampled_from([{"format": "pt"}, {}, {"a": "é\n"}])
    )  # the library writes several in random order
    parts = []
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.ndim else 1
        borders = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=2))})
        # Columns in reverse twice: the same values, bytes not in order.
        strided = tensor if tensor.ndim < 2 else np.flip(np.flip(tensor, 1).copy(), 1)
        ranges = list(itertools.pairwise(borders)) if tensor.ndim else [(0, 1)]
        parts += [(name, start, strided[start:stop] if tensor.ndim else tensor) for start, stop in ranges]
    with tempfile.TemporaryDirectory() as directory:
        with TensorFilesWriter(directory, types_of(tensors), metadata=metadata) as writer:
            for name, start, part in data.draw(st.permutations(parts)):
                writer.write(name, start, part)
            writer.finish()
        assert os.listdir(directory) == ["model.safetensors"]
        assert (Path(directory) / "model.safetensors").read_bytes() == save(tensors, metadata or None)


def test_files_are_filled_as_transformers_fills_them(tmp_path):
    sizes = {"z": 6, "b": 6, "c": 2, "d": 11, "e": 6, "f": 2, "a": 2}
    tensors = {name: np.full((size, 25), i, np.float32) for i, (name, size) in enumerate(sizes.items())}
    with TensorFilesWriter(tmp_path, types_of(tensors), max_file_bytes=10 * 100) as writer:
        write_all(writer, tensors)
        assert not list(tmp_path.glob("*.safetensors"))
        writer.finish()
    files = [f"model-{i}-of-00004.safetensors" for i in ("00001", "00002", "00003", "00004")]
    assert sorted(os.listdir(tmp_path)) == [*files, "model.safetensors.index.json"]
    assert [sorted(load_file(tmp_path / file)) for file in files] == [["z"], ["d"], ["b", "c"], ["a", "e", "f"]]
    text = (tmp_path / "model.safetensors.index.json").read_text()
    weight_map = {
        "z": files[0],
        "d": files[1],
        "b": files[2],
        "c": files[2],
        "e": files[3],
        "f": files[3],
        "a": files[3],
    }
    index = {"metadata": {"total_parameters": 35 * 25, "total_size": 3500}, "weight_map": weight_map}
    assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
    with TensorDirectory(tmp_path) as directory:
        assert all(np.array_equal(whole(directory, name), tensor) for name, tensor in tensors.items())


def test_a_tensor_of_exactly_the_limit_is_not_too_large():
    types = {name: jax.ShapeDtypeStruct((size,), np.int8) for name, size in {"b": 4, "c": 10, "a": 4}.items()}
    files = plan_files(types, max_file_bytes=10, metadata={})
    assert [list(file.offsets) for file in files] == [["b"], ["c"], ["a"]]


def test_tensors_begin_at_multiples_of_their_element():
    types = {f"{'x' * n}{name}": jax.ShapeDtypeStruct((3,), d) for n, (name, d) in enumerate(DTYPES.items())}
    for file in plan_files(types, max_file_bytes=20, metadata={"format": "pt"}):
        assert len(file.header) % 8 == 0
        assert all(offset % types[name].dtype.itemsize == 0 for name, offset in file.offsets.items())


TENSORS = {"a": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.arange(5, dtype=np.float16), "c": np.zeros(())}


def test_an_interrupted_export_goes_on(tmp_path):
    with TensorFilesWriter(tmp_path, types_of(TENSORS), max_file_bytes=48) as writer:
        writer.write("a", 2, TENSORS["a"][2:])
        writer.sync()
    with TensorFilesWriter(tmp_path, types_of(TENSORS), max_file_bytes=48) as writer:
        writer.mark_written("a", 2, 4)
        writer.write("b", 0, TENSORS["b"])
        writer.write("c", 0, TENSORS["c"])
        with pytest.raises(
            CheckpointError, match=r"1 tensors are not complete:\n  a float32\[4,3\]: has rows \[\(2, 4\)\]"
        ):
            writer.finish()
        writer.write("a", 0, TENSORS["a"][:2])
        writer.finish()
    with TensorDirectory(tmp_path) as directory:
        assert all(np.array_equal(whole(directory, name), tensor) for name, tensor in TENSORS.items())


def test_a_hole_between_written_rows_is_not_complete(tmp_path):
    with TensorFilesWriter(tmp_path, types_of(TENSORS)) as writer:
        write_all(writer, {"b": TENSORS["b"], "c": TENSORS["c"]})
        for row in (3, 0, 1):
            writer.write("a", row, TENSORS["a"][row : row + 1])
        with pytest.raises(CheckpointError, match=r"a float32\[4,3\]: has rows \[\(0, 2\), \(3, 4\)\]"):
            writer.finish()
    assert os.listdir(tmp_path) == ["model.safetensors.partial"]


def test_a_write_that_the_system_cuts_short_goes_on(tmp_path, monkeypatch):
    pwrite = os.pwrite
    with TensorFilesWriter(tmp_path, types_of(TENSORS)) as writer:
        monkeypatch.setattr(os, "pwrite", lambda descriptor, data, position: pwrite(descriptor, data[:7], position))
        write_all(writer, TENSORS)
        writer.finish()
    assert (tmp_path / "model.safetensors").read_bytes() == save(TENSORS, {"format": "pt"})


def test_an_index_beside_unfinished_files_is_not_ours(tmp_path):
    with TensorFilesWriter(tmp_path, types_of(TENSORS), max_file_bytes=48):
        (tmp_path / "model.safetensors.index.json").write_text("precious")
    with pytest.raises(CheckpointError, match=r"index\.json exists already"):
        TensorFilesWriter(tmp_path, types_of(TENSORS), max_file_bytes=48)


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_stop_while_files_get_their_names_is_no_loss(tmp_path, renamed, monkeypatch):
    count = 0
    rename = Path.rename

    def stop(path, target):
        nonlocal count
        count += 1
        if count > renamed:
            raise KeyboardInterrupt
        return rename(path, target)

    with TensorFilesWriter(tmp_path, types_of(TENSORS), max_file_bytes=48) as writer:
        write_all(writer, TENSORS)
        monkeypatch.setattr(Path, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
    monkeypatch.setattr(Path, "rename", rename)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    with TensorFilesWriter(tmp_path, types_of(TENSORS), max_file_bytes=48) as writer:
        for name in TENSORS:
            writer.mark_written(name, 0, TENSORS[name].shape[0] if TENSORS[name].ndim else 1)
        writer.finish()
    assert not list(tmp_path.glob("*.partial"))
    with TensorDirectory(tmp_path) as directory:
        assert all(np.array_equal(whole(directory, name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("length", [0, 5, 100])
def test_a_file_that_was_stopped_while_it_was_made_is_made_again(tmp_path, length):
    (file,) = plan_files(types_of(TENSORS), max_file_bytes=10**6, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.partial").write_bytes(file.header[:length])
    with TensorFilesWriter(tmp_path, types_of(TENSORS)) as writer:
        write_all(writer, TENSORS)
        writer.finish()
    assert (tmp_path / "model.safetensors").read_bytes() == save(TENSORS, {"format": "pt"})


@pytest.mark.parametrize(
    "existing",
    ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "x.safetensors.partial"],
)
def test_what_is_there_is_never_written_over(tmp_path, existing):
    (tmp_path / existing).write_text("precious")
    with pytest.raises(CheckpointError, match=f"{existing} exists already"):
        TensorFilesWriter(tmp_path, types_of(TENSORS))
    assert os.listdir(tmp_path) == [existing]
    assert (tmp_path / existing).read_text() == "precious"


def test_a_finished_export_and_another_export_are_refused(tmp_path):
    with TensorFilesWriter(tmp_path, types_of(TENSORS)) as writer:
        write_all(writer, TENSORS)
    changed = types_of(TENSORS) | {"c": jax.ShapeDtypeStruct((2,), F32)}
    before = (tmp_path / "model.safetensors.partial").read_bytes()
    with pytest.raises(CheckpointError, match="belongs to another export"):
        TensorFilesWriter(tmp_path, changed)
    assert (tmp_path / "model.safetensors.partial").read_bytes() == before
    with TensorFilesWriter(tmp_path, types_of(TENSORS)) as writer:
        write_all(writer, TENSORS)
        writer.finish()
    with pytest.raises(CheckpointError, match=r"model\.safetensors exists already"):
        TensorFilesWriter(tmp_path, types_of(TENSORS))


@pytest.mark.parametrize(
    ("name", "row", "array", "message"),
    [
        ("x", 0, np.zeros(2), "no tensor x"),
        ("a", 0, np.zeros((2, 3)), r"float64\[2,3\] are not rows of the tensor a, which is float32\[4,3\]"),
        ("a", 0, np.zeros((2, 2), F32), r"float32\[2,2\] are not rows"),
        ("a", 0, np.zeros(3, F32), "not rows"),
        ("a", 3, np.zeros((2, 3), F32), "rows 3 to 5 are not in the tensor a, which has 4"),
        ("a", -1, np.zeros((2, 3), F32), "rows -1 to 1"),
        ("c", 1, np.zeros(()), "rows 1 to 2"),
        ("c", 0, np.zeros(1), "not rows"),
    ],
)
def test_wrong_rows_are_refused(tmp_path, name, row, array, message):
    with TensorFilesWriter(tmp_path, types_of(TENSORS)) as writer, pytest.raises(ValueError, match=message):
        writer.write(name, row, array)


def test_a_dtype_that_safetensors_cannot_hold_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tensor w is complex64\[2\]; safetensors hold float64, float32"):
        TensorFilesWriter(tmp_path / "new", {"w": jax.ShapeDtypeStruct((2,), np.complex64)})
    assert not (tmp_path / "new").exists()


def test_a_transposed_array_is_copied_in_pieces_only(tmp_path):
    array = np.ones((2000, 8000), F32).T  # 64 MB
    with TensorFilesWriter(tmp_path, {"w": jax.ShapeDtypeStruct(array.shape, F32)}) as writer:
        tracemalloc.start()
        writer.write("w", 0, array)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 40e6
