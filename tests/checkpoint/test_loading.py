"""Arrays read straight onto devices: any mesh, padding, copies, kinds of leaves, and little memory in flight."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import loading
from jaxpar.checkpoint.errors import DamagedCheckpointError
from jaxpar.checkpoint.loading import load_arrays
from jaxpar.checkpoint.store import Store

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
WHOLE = P()
VALUES = {
    "params/matrix": np.arange(13 * 8, dtype=np.float32).reshape(13, 8),
    "params/half": np.arange(32, dtype=np.float32).reshape(4, 8).astype(ml_dtypes.bfloat16),
    "params/flags": np.arange(8) % 3 == 0,
    "params/count": np.int32(7),
}


@pytest.fixture(scope="module")
def step_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    replicated = NamedSharding(MESH, WHOLE)
    params = {name.partition("/")[2]: jax.device_put(value, replicated) for name, value in VALUES.items()}
    with Store(directory) as store:
        store.save(1, {"params": params}, {})
    return directory / "1"


def target(name, spec=WHOLE, shape=None, mesh=MESH):
    value = VALUES[name]
    return jax.ShapeDtypeStruct(shape or np.shape(value), value.dtype, sharding=NamedSharding(mesh, spec))


def assert_loaded(arrays, targets):
    assert list(arrays) == list(targets)
    for name, array in arrays.items():
        form, value = targets[name], VALUES[name]
        assert (array.shape, array.dtype, array.sharding) == (form.shape, form.dtype, form.sharding)
        extra = [(0, size - held) for size, held in zip(form.shape, np.shape(value), strict=True)]
        assert np.array_equal(np.asarray(array), np.pad(value, extra) if extra else value)


def test_every_kind_of_leaf_comes_back_on_every_device(step_directory):
    targets = {name: target(name) for name in VALUES}
    assert_loaded(load_arrays(step_directory, targets), targets)


@pytest.mark.parametrize(
    ("rows", "spec"),
    [(13, P(None, "tensor")), (16, P("tensor", "fsdp")), (16, P()), (32, P(("fsdp", "tensor"))), (32, P("tensor"))],
)
def test_shards_partly_or_wholly_beyond_the_array_are_zero(step_directory, rows, spec):
    """Of 32 rows on 8 devices, the last four devices hold nothing of the 13."""
    targets = {"params/matrix": target("params/matrix", spec, (rows, 8))}
    assert_loaded(load_arrays(step_directory, targets), targets)


def test_one_device_and_a_part_of_the_leaves(step_directory):
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",), axis_types=(AxisType.Explicit,))
    targets = {"params/half": target("params/half", P("fsdp"), mesh=mesh)}
    assert_loaded(load_arrays(step_directory, targets), targets)


def test_little_memory_changes_nothing(step_directory, monkeypatch):
    monkeypatch.setattr(loading, "BYTES_IN_FLIGHT", 1)
    targets = {name: target(name) for name in VALUES} | {"params/matrix": target("params/matrix", P(None, "fsdp"))}
    assert_loaded(load_arrays(step_directory, targets), targets)


def test_restored_arrays_can_be_donated(step_directory):
    """Their buffers may be numpy's: nothing may be written into them by a step that takes them over."""
    array = load_arrays(step_directory, {"params/matrix": target("params/matrix")})["params/matrix"]
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    assert np.array_equal(np.asarray(double(array)), VALUES["params/matrix"] * 2)


def test_a_leaf_that_cannot_be_read_is_named(step_directory, tmp_path):
    damaged = tmp_path / "1"
    damaged.mkdir()
    (damaged / "params").mkdir()
    (damaged / "params" / "_METADATA").write_bytes((step_directory / "params" / "_METADATA").read_bytes())
    with pytest.raises(DamagedCheckpointError, match=r"params/half of .* cannot be read"):
        load_arrays(damaged, {"params/half": target("params/half")})
