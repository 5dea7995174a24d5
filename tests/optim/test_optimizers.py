"""Every optimizer on stacked, sharded, padded parameters against plain optax on one matrix or vector per layer."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import Config
from jaxpar.mesh import make_mesh
from jaxpar.optim import decay_mask, learning_rate, make_optimizer
from jaxpar.optim.blocks import map_blocks, moves_less
from jaxpar.optim.muon import newton_schulz
from jaxpar.optim.roles import is_axes, muon_mask
from jaxpar.plan.optimizer_memory import state_bytes
from jaxpar.plan.param_views import view_of
from jaxpar.plan.shape import shape_of
from jaxpar.state import fresh_state
from jaxpar.step import update
from tests.parity.harness import Outcome, assert_same, build, parity_config, train

VOCAB, PADDED = 37, 40
MESH_AXES = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
SIZES = {"embed": 16, "vocab": PADDED, "heads": 4, "kv_heads": 2, "head_dim": 6, "mlp": 20, "experts": 2, "layers": 3}
AXES = {
    "embedding": ("vocab", "embed"),
    "layers": {
        "attention_norm": ("layers", "norm"),
        "q": ("layers", "embed", "heads", "head_dim"),
        "k": ("layers", "embed", "kv_heads", "head_dim"),
        "k_bias": ("layers", "kv_heads", "head_dim"),
        "o": ("layers", "heads", "head_dim", "embed"),
        "expert_up": ("layers", "experts", "embed", "mlp"),
    },
    "adapter": ("embed", "mlp"),
    "head": ("embed", "vocab"),
}
"""Six blocks of experts, three of the other matrices, one adapter: exchanged, exchanged with padding, gathered."""

SETTINGS = {
    "adamw": {},
    "lion": {"lr": 1e-3},
    "sgd": {},
    "sgd nesterov": {"momentum": 0.8, "nesterov": True},
    "sgd without momentum": {"momentum": 0.0},
    "adafactor": {"min_factored_dim": 12},
    "adafactor with momentum": {"min_factored_dim": 12, "momentum": 0.9, "scale_by_param_rms": False},
    "adafactor unfactored": {"factored": False, "clip_update_rms": 0.0, "decay_exponent": 0.7},
    "muon": {},
    "muon spectral": {"update_scale": "spectral", "nesterov": False, "ns_steps": 3, "adamw_lr": 3e-3},
}
VALUES = ((0, 0.3), (1, 0.01), (2, 1.0), (3, 0.1))
"""Seed and size of the parameters and of the gradients of three steps, clipped and not."""


def config_of(case: str) -> Config:
    optim = {"name": case.split()[0], "lr": 1e-2, "warmup_steps": 2, "clip_norm": 0.5, **SETTINGS[case]}
    return Config(optim=optim, train={"steps": 20}, precision={"compute": "float32"})


def tree(seed: int, scale: float = 1.0) -> dict:
    """Random float32 leaves, zero where the vocabulary is padded, as parameters and gradients are."""
    rng = np.random.default_rng(seed)

    def leaf(axes: tuple[str, ...]) -> np.ndarray:
        shape = [16 if axis == "norm" else SIZES[axis] for axis in axes]
        values = (scale * rng.normal(size=shape)).astype(np.float32)
        if "vocab" in axes:
            np.moveaxis(values, axes.index("vocab"), 0)[VOCAB:] = 0
        return values

    return jax.tree.map(leaf, AXES, is_leaf=is_axes)


@functools.cache
def after_steps(case: str, sizes: tuple) -> tuple[dict, object]:
    """Parameters and optimizer state after some steps of production code on a mesh."""
    config, mesh = config_of(case), make_mesh(dict(sizes), jax.devices()[: math.prod(n for _, n in sizes)])
    optimizer = make_optimizer(config.optim, AXES, vocab_size=VOCAB)
    used = {logical: axis for logical, axis in MESH_AXES.items() if mesh.shape[axis] > 1}
    shardings = jax.tree.map(lambda axes: NamedSharding(mesh, P(*map(used.get, axes))), AXES, is_leaf=is_axes)

    placed = [jax.device_put(tree(seed, scale), shardings) for seed, scale in VALUES]
    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(fresh_state, optimizer=optimizer))(placed[0])
        step = jax.jit(lambda state, grads: update(config, optimizer, state, grads, {"loss": jnp.ones(())})[0])
        for grads in placed[1:]:
            state = step(state, grads)
    return jax.device_get(state.params), state.optimizer


ONE_DEVICE = (("data", 1),)
SHARDED = (("fsdp", 4), ("tensor", 2))
DEEP = (("data", 2), ("fsdp", 2))


def unstacked(stacked: dict) -> dict[tuple, np.ndarray]:
    """A matrix or vector per layer and expert, heads side by side, the vocabulary without its padding."""
    flat = {}
    axes_by_path = dict(jax.tree_util.tree_leaves_with_path(AXES, is_leaf=is_axes))
    for path, leaf in jax.tree_util.tree_leaves_with_path(stacked):
        axes = axes_by_path[path]
        leaf = np.asarray(leaf)
        if "vocab" in axes:
            leaf = np.take(leaf, range(VOCAB), axes.index("vocab"))
        view = view_of(axes)
        for index in np.ndindex(*leaf.shape[: view.num_stacked]):
            block = leaf[index]
            rows = block.shape[: len(view.row_dims)] if view.split else ()
            flat[(*path, *index)] = block.reshape(math.prod(rows), -1) if rows else block.reshape(-1)
    return {str(key): value for key, value in flat.items()}


def by_block(values: dict) -> dict:
    """What is known by parameter, for each of its blocks."""
    return {key: value.flat[0] for key, value in unstacked(values).items()}


def reference(case: str) -> optax.GradientTransformation:
    """The same optimizer from plain optax, for unstacked matrices and vectors."""
    config = config_of(case)
    optim, settings = config.optim, SETTINGS[case]
    full = lambda value, axes: np.full([16 if a == "norm" else SIZES[a] for a in axes], value)  # noqa: E731
    decayed, is_own = (by_block(jax.tree.map(full, mask, AXES)) for mask in (decay_mask(optim, AXES), muon_mask(AXES)))
    name = optim.name
    if name == "adamw":
        core = optax.scale_by_adam(0.9, 0.95, 1e-8)
    elif name == "lion":
        core = optax.scale_by_lion(0.9, 0.99)
    elif name == "sgd":
        core = optax.trace(settings.get("momentum", 0.9), settings.get("nesterov", False))
    elif name == "adafactor":
        core = optax.chain(
            optax.scale_by_factored_rms(
                settings.get("factored", True), settings.get("decay_exponent", 0.8), min_dim_size_to_factor=12
            ),
            optax.clip_by_block_rms(1.0) if settings.get("clip_update_rms", 1.0) else optax.identity(),
            optax.scale_by_param_block_rms() if settings.get("scale_by_param_rms", True) else optax.identity(),
            optax.ema(settings["momentum"], debias=False) if "momentum" in settings else optax.identity(),
        )
    else:
        own_blocks = {key: optax.contrib.MuonDimensionNumbers() for key, mine in is_own.items() if mine}
        muon = optax.contrib.scale_by_muon(
            ns_steps=settings.get("ns_steps", 5),
            nesterov=settings.get("nesterov", True),
            weight_dimension_numbers=lambda updates: {key: own_blocks.get(key, optax.MaskedNode()) for key in updates},
        )
        spectral = settings.get("update_scale") == "spectral"
        scaled = optax.stateless_with_tree_map(
            lambda u, _: u * (max(1, u.shape[1] / u.shape[0]) ** 0.5 if spectral else 0.2 * max(u.shape) ** 0.5)
        )
        core = optax.partition(
            {"muon": optax.chain(muon, scaled), "adamw": optax.scale_by_adam(0.9, 0.95, 1e-8)},
            {key: "muon" if mine else "adamw" for key, mine in is_own.items()},
        )
    ratio = optim.adamw_lr / optim.lr if optim.adamw_lr else 1.0
    return optax.chain(
        optax.clip_by_global_norm(0.5),
        core,
        optax.add_decayed_weights(0.1, mask=decayed),
        optax.masked(optax.scale(ratio), {key: not mine for key, mine in is_own.items()}),
        optax.scale_by_learning_rate(learning_rate(optim, 20)),
    )


@functools.cache
def expected(case: str) -> dict[str, np.ndarray]:
    """Parameters after the steps by plain optax."""
    optimizer = reference(case)

    @jax.jit
    def step(params: dict, state: object, grads: dict) -> tuple[dict, object]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, *all_grads = (unstacked(tree(seed, scale)) for seed, scale in VALUES)
    state = optimizer.init(params)
    for grads in all_grads:
        params, state = step(params, state, grads)
    return jax.device_get(params)


def check(case: str, sizes: tuple) -> None:
    params, _ = after_steps(case, sizes)
    for name, want in expected(case).items():
        got = unstacked(params)[name]
        assert np.max(np.abs(got - want)) <= 1e-5 * np.max(np.abs(want)), name


@pytest.mark.parametrize("case", ["lion", "adafactor", "muon"])
def test_sharded_stacks_are_updated_as_optax_updates_each_layer(case):
    check(case, SHARDED)


@pytest.mark.proof
@pytest.mark.parametrize("sizes", [ONE_DEVICE, SHARDED, DEEP], ids=["one device", "fsdp4 x tensor2", "data2 x fsdp2"])
@pytest.mark.parametrize("case", SETTINGS)
def test_every_optimizer_is_that_of_optax_layer_by_layer(case, sizes):
    check(case, sizes)


@pytest.mark.parametrize("sizes", [ONE_DEVICE, SHARDED], ids=["one device", "fsdp4 x tensor2"])
def test_padding_of_the_vocabulary_stays_zero_in_parameters_and_means(sizes):
    params, state = after_steps("adafactor", sizes)
    assert not np.any(params["embedding"][VOCAB:])
    assert not np.any(params["head"][:, VOCAB:])
    assert state[0].rows["embedding"].shape == (PADDED, 1)
    assert np.all(np.asarray(state[0].rows["embedding"])[:VOCAB] > 0)
    assert not np.any(np.asarray(state[0].rows["embedding"])[VOCAB:])
    assert not np.any(np.asarray(state[0].columns["head"])[:, VOCAB:])


def test_means_of_a_factored_moment_are_sharded_like_the_dims_that_they_keep():
    _, state = after_steps("adafactor", SHARDED)
    rows, columns = state[0].rows["layers"], state[0].columns["layers"]
    assert (rows["q"].shape, rows["q"].sharding.spec) == ((3, 16, 1, 1), P(None, "fsdp", None, None))
    assert (columns["q"].shape, columns["q"].sharding.spec) == ((3, 1, 4, 6), P(None, None, "tensor", None))
    experts = columns["expert_up"]
    assert (experts.shape, experts.sharding.spec) == ((3, 2, 1, 20), P(None, None, None, "tensor"))
    assert state[0].whole["layers"]["q"] is None
    assert (rows["k"].shape, rows["attention_norm"]) == ((3, 16, 1, 1), None)


@pytest.mark.parametrize(("name", "settings"), [(case.split()[0], SETTINGS[case]) for case in SETTINGS])
def test_plan_knows_what_each_optimizer_keeps(name, settings):
    """Bytes of the whole state on one device, with a vocabulary that needs no padding."""
    settings = {key: value for key, value in settings.items() if key != "lr"}
    optim = {"eps": None, "name": name, "lr": 1e-2, **settings}
    program = build(parity_config({}, model={"family": "qwen2", "vocab_size": 152}, optim=optim))
    state = program.abstract_state.optimizer
    kept = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.shape)
    per_param = state_bytes(program.config)
    shape = shape_of(program.config.model)
    tables, vectors = shape.embedding_params, shape.vector_params
    matrices = program.plan.num_params - tables - vectors
    planned = (
        matrices * per_param.optimizer
        + tables * per_param.of("tables").optimizer
        + vectors * per_param.of("vectors").optimizer
    )
    assert planned == pytest.approx(kept, rel=1e-9)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8, 9])
@pytest.mark.parametrize(("rows", "columns"), [(12, 20), (20, 12)])
def test_newton_schulz_makes_singular_values_near_one(num_blocks, rows, columns):
    rng = np.random.default_rng(num_blocks)
    u, s, vt = np.linalg.svd(rng.normal(size=(rows, columns)), full_matrices=False)
    result = np.asarray(newton_schulz(jnp.asarray((u * s) @ vt, jnp.float32), 5, 1e-8))
    singular = np.diag(u.T @ result @ vt.T)
    assert np.all((singular > 0.6) & (singular < 1.3))
    np.testing.assert_allclose(result, (u * singular) @ vt, atol=1e-4)


@pytest.mark.parametrize(
    ("num_blocks", "num_devices", "exchanges"),
    [
        (1, 8, False),
        (2, 8, False),
        (3, 8, True),
        (32, 8, True),
        (32, 64, True),
        (4, 2, False),
        (5, 2, False),
        (6, 3, True),
    ],
)
def test_the_way_that_moves_fewer_bytes_is_taken(num_blocks, num_devices, exchanges):
    assert moves_less(num_blocks, num_devices) == exchanges


@pytest.mark.proof
@pytest.mark.parametrize("stacked", [(1,), (2,), (3,), (8,), (9,), (3, 4)], ids=str)
def test_blocks_are_whole_wherever_they_lie(stacked):
    """A function of the whole block, on every mesh, is what it is without one."""
    x = np.random.default_rng(0).normal(size=(*stacked, 8, 2, 16)).astype(np.float32)
    function = lambda block: jnp.cumsum(block.reshape(-1)).reshape(block.shape) / jnp.max(block)  # noqa: E731
    expected = np.asarray(map_blocks(function, jnp.asarray(x), len(stacked)))
    for sizes, spec in (
        ({"fsdp": 8}, ("fsdp", None, None)),
        ({"fsdp": 2, "context": 2, "tensor": 2}, (("fsdp", "context"), "tensor", None)),
        ({"data": 2, "tensor": 4}, (None, None, "tensor")),
    ):
        mesh = make_mesh(sizes)
        placed = jax.device_put(x, NamedSharding(mesh, P(*[None] * len(stacked), *spec)))
        with jax.set_mesh(mesh):
            done = jax.jit(functools.partial(map_blocks, function, num_stacked=len(stacked)))(placed)
        assert done.sharding == placed.sharding
        np.testing.assert_array_equal(done, expected)


@pytest.mark.proof
@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("case", SETTINGS)
def test_a_model_trains_alike_on_every_mesh(case, mesh):
    optim = {"eps": None, "name": case.split()[0], "lr": 1e-2, **SETTINGS[case]}
    if optim["name"] == "adamw":
        optim["eps"] = 1e-3
    assert_same(train(build(parity_config(mesh, optim=optim))), alone(tuple(optim.items())))


@functools.cache
def alone(optim: tuple) -> Outcome:
    """One device."""
    return train(build(parity_config({}, optim=dict(optim))))
