"""Reading Hugging Face checkpoints: exact slices under any sharding, exact bytes, one error for everything wrong."""

from __future__ import annotations

import collections
import itertools
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from jaxpar.checkpoint.boxes import pieces
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.safetensors import TensorDirectory, read_tensors
from jaxpar.checkpoint.safetensors_writer import TensorFilesWriter
from jaxpar.checkpoint.views import row_slabs
from jaxpar.families.keymap import HARMLESS_TENSORS, TensorSource
from jaxpar.families.llama import llama_keymap

ORACLE = Path(__file__).parents[1] / "data" / "hf"
FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False, "tied": False},
    "llama31": {"qkv_bias": False, "qk_norm": False, "tied": True},
    "qwen2": {"qkv_bias": True, "qk_norm": False, "tied": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True, "tied": False},
}
VOCAB, VOCAB_PADDED = 160, 256


def explicit_mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, ("fsdp", "tensor")[: len(shape)], axis_types=(AxisType.Explicit,) * len(shape))


MESH = explicit_mesh(2, 4)


def dim_sizes(family: str) -> dict[str, int]:
    config = json.loads((ORACLE / family / "config.json").read_text())
    heads = config["num_attention_heads"]
    return {
        "layer": config["num_hidden_layers"],
        "embed": config["hidden_size"],
        "heads": heads,
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "mlp": config["intermediate_size"],
        "vocab": VOCAB_PADDED,
    }


def independent_parameters(tensors: dict[str, np.ndarray], family: str) -> dict[tuple[str, ...], np.ndarray]:
    """The parameters, put together by hand without the key map."""
    s = dim_sizes(family)
    D, H, K, hd = s["embed"], s["heads"], s["kv_heads"], s["head_dim"]

    def stack(name, form):
        return np.stack([form(tensors[f"model.layers.{layer}.{name}"]) for layer in range(s["layer"])])

    def pad(w):
        return np.concatenate([w, np.zeros((VOCAB_PADDED - VOCAB, D), w.dtype)])

    params = {
        ("embedding",): pad(tensors["model.embed_tokens.weight"]),
        ("layers", "attention_norm"): stack("input_layernorm.weight", lambda w: w),
        ("layers", "q"): stack("self_attn.q_proj.weight", lambda w: w.T.reshape(D, H, hd)),
        ("layers", "k"): stack("self_attn.k_proj.weight", lambda w: w.T.reshape(D, K, hd)),
        ("layers", "v"): stack("self_attn.v_proj.weight", lambda w: w.T.reshape(D, K, hd)),
        ("layers", "o"): stack("self_attn.o_proj.weight", lambda w: w.T.reshape(H, hd, D)),
        ("layers", "mlp_norm"): stack("post_attention_layernorm.weight", lambda w: w),
        ("layers", "gate"): stack("mlp.gate_proj.weight", lambda w: w.T),
        ("layers", "up"): stack("mlp.up_proj.weight", lambda w: w.T),
        ("layers", "down"): stack("mlp.down_proj.weight", lambda w: w.T),
        ("final_norm",): tensors["model.norm.weight"],
    }
    if FAMILIES[family]["qkv_bias"]:
        for name, heads in (("q", H), ("k", K), ("v", K)):
            params["layers", f"{name}_bias"] = stack(f"self_attn.{name}_proj.bias", lambda w, n=heads: w.reshape(n, hd))
    if FAMILIES[family]["qk_norm"]:
        for name in ("q_norm", "k_norm"):
            params["layers", name] = stack(f"self_attn.{name}.weight", lambda w: w)
    if not FAMILIES[family]["tied"]:
        params["head",] = pad(tensors["lm_head.weight"]).T
    return params


def targets_of(params, spec_of=lambda path, shape: P(), mesh=MESH, dtype=np.float32):
    return {
        path: jax.ShapeDtypeStruct(value.shape, dtype, sharding=NamedSharding(mesh, spec_of(path, value.shape)))
        for path, value in params.items()
    }


def as_index(source: Path, directory: Path, num_files: int = 3) -> Path:
    """The same tensors in several files with an index."""
    directory.mkdir()
    tensors = load_file(source)
    files = collections.defaultdict(dict)
    for i, (name, values) in enumerate(tensors.items()):
        files[f"model-{i % num_files + 1:05}-of-{num_files:05}.safetensors"][name] = values
    for file_name, content in files.items():
        save_file(content, directory / file_name)
    weight_map = {name: file_name for file_name, content in files.items() for name in content}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.fixture
def llama(tmp_path) -> Path:
    (tmp_path / "llama").mkdir()
    return Path(shutil.copy(ORACLE / "llama" / "model.safetensors", tmp_path / "llama")).parent


def ignored(tied):
    return (*HARMLESS_TENSORS, r"lm_head\.weight") if tied else HARMLESS_TENSORS


def read(directory, *, family="llama", **options):
    flags = FAMILIES[family]
    params = independent_parameters(load_file(ORACLE / family / "model.safetensors"), family)
    targets = options.pop("targets", None) or targets_of(params)
    options = {"unpadded": {"vocab": VOCAB}, "ignored": ignored(flags["tied"])} | options
    return read_tensors(directory, llama_keymap(**flags), targets, **options)


# --- the key map and the files of four families -----------------------------------------------------------------------


def fully_sharded(path, shape):
    """As the trainer shards: fsdp on embed, tensor on heads, mlp and vocab."""
    dims = llama_keymap(False, qkv_bias=True, qk_norm=True)[path].dims
    axes = {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    return P(*(axes.get(dim) for dim in dims))


@pytest.mark.parametrize("layout", ["replicated", "fsdp x tensor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_read_exactly(family, layout):
    want = independent_parameters(load_file(ORACLE / family / "model.safetensors"), family)
    targets = targets_of(want, *([fully_sharded] if layout == "fsdp x tensor" else []))
    got = read(ORACLE / family, family=family, targets=targets)
    assert got.keys() == want.keys()
    for path, array in got.items():
        assert array.sharding == targets[path].sharding
        assert array.dtype == np.float32
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), want[path][shard.index]), path


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_have_the_same_key_map(family, tmp_path):
    shutil.copy(ORACLE / family / "grads.safetensors", tmp_path / "model.safetensors")
    want = independent_parameters(load_file(ORACLE / family / "grads.safetensors"), family)
    got = read(tmp_path, family=family)
    norm = math.sqrt(sum(float(np.sum(np.square(np.asarray(g, np.float64)))) for g in got.values()))
    assert norm == pytest.approx(float(np.load(ORACLE / family / "expected.npz")["grad_norm"]), rel=1e-6)
    for path, array in got.items():
        assert np.array_equal(np.asarray(array), want[path]), path


def test_index_and_single_file_give_the_same(tmp_path):
    single = read(ORACLE / "qwen2", family="qwen2")
    indexed = read(as_index(ORACLE / "qwen2" / "model.safetensors", tmp_path / "x"), family="qwen2")
    assert all(np.array_equal(single[path], indexed[path]) for path in single)


def test_bytes_read_are_those_of_the_distinct_shards(tmp_path):
    params = independent_parameters(load_file(ORACLE / "llama" / "model.safetensors"), "llama")
    for mesh in (explicit_mesh(2, 4), explicit_mesh(8, 1), explicit_mesh(1, 1)):
        with TensorDirectory(ORACLE / "llama") as tensors:
            read(tensors, targets=targets_of(params, fully_sharded, mesh))
            stored = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.types.values())
            assert tensors.bytes_read == stored


# --- any rule, any box ------------------------------------------------------------------------------------------------

RULES = {
    "q": ("t.{layer}", "(heads head_dim) embed -> layer embed heads head_dim"),
    "o": ("t.{layer}", "embed (heads head_dim) -> layer heads head_dim embed"),
    "bias": ("t.{layer}", "(heads head_dim) -> layer heads head_dim"),
    "embedding": ("t", "vocab embed -> vocab embed"),
    "head": ("t", "vocab embed -> embed vocab"),
    "experts": ("t.{layer}.{expert}", "mlp embed -> layer expert embed mlp"),
    "three merged": ("t", "(a b c) -> b a c"),
    "two merged": ("t.{layer}", "(a b) (c d) -> d layer a c b"),
}


@st.composite
def parameter_and_box(draw):
    source = TensorSource(*RULES[draw(st.sampled_from(sorted(RULES)))])
    sizes = {dim: draw(st.integers(1, 4)) for dim in source.dims}
    padding = [draw(st.integers(0, 2)) for _ in source.dims]
    box = []
    for dim, pad in zip(source.dims, padding, strict=True):
        start = draw(st.integers(0, sizes[dim] + pad))
        box.append((start, draw(st.integers(start, sizes[dim] + pad))))
    return source, sizes, box


@given(parameter_and_box())
@settings(max_examples=200, deadline=None)
def test_pieces_hold_every_element_of_a_box_once_and_nothing_else(case):
    source, sizes, box = case
    full = np.arange(1, 1 + math.prod(sizes.values())).reshape([sizes[dim] for dim in source.dims])
    merged = [dim for dims in source.source_dims for dim in dims]
    tensors = {}
    for indices, name in source.names(sizes):
        part = full[tuple(indices.get(dim, slice(None)) for dim in source.dims)]
        unstacked = [dim for dim in source.dims if dim in merged]
        tensors[name] = part.transpose([unstacked.index(dim) for dim in merged]).reshape(source.source_shape(sizes))
    got = np.zeros([stop - start for start, stop in box], int)
    elements = 0
    for name, piece in pieces(source, box, sizes):
        values = tensors[name][piece.index]
        elements += values.size
        piece.put(got, values)
    padded = np.pad(full, [(0, 2)] * full.ndim)
    assert np.array_equal(got, padded[tuple(slice(*bounds) for bounds in box)])
    assert elements == np.count_nonzero(got)


SPECS = [None, "fsdp", "tensor", ("fsdp", "tensor"), ("tensor", "fsdp")]


def test_every_shard_of_every_spec_is_exact_and_read_once():
    """All placements of the axes on the dims of q and o, embedding and head, against numpy, with bytes counted."""
    tensors = load_file(ORACLE / "qwen3" / "model.safetensors")
    want = independent_parameters(tensors, "qwen3")
    keymap = llama_keymap(**FAMILIES["qwen3"])
    checked = 0
    for path in (("layers", "q"), ("layers", "o"), ("embedding",), ("head",)):
        value, true_vocab = want[path], {"vocab": VOCAB}
        needed = {"embedding": VOCAB * 64 * 4, "head": VOCAB * 64 * 4}.get(path[0], value.nbytes)
        for entries in itertools.product(SPECS, repeat=value.ndim):
            axes = [axis for e in entries for axis in ((e,) if isinstance(e, str) else e or ())]
            parts = [math.prod(MESH.shape[a] for a in ((e,) if isinstance(e, str) else e or ())) for e in entries]
            if len(set(axes)) != len(axes) or any(n % p for n, p in zip(value.shape, parts, strict=True)):
                continue
            target = jax.ShapeDtypeStruct(value.shape, np.float32, sharding=NamedSharding(MESH, P(*entries)))
            with TensorDirectory(ORACLE / "qwen3") as directory:
                ignored = [".*"]
                [array] = read_tensors(
                    directory, {path: keymap[path]}, {path: target}, unpadded=true_vocab, ignored=ignored
                ).values()
                assert directory.bytes_read == needed
            for shard in array.addressable_shards:
                assert np.array_equal(np.asarray(shard.data), value[shard.index])
            checked += 1
    assert checked > 60


@pytest.mark.parametrize("mapped_bytes", [1, 50, 1000])
def test_a_box_is_read_through_several_mappings(tmp_path, mapped_bytes, monkeypatch):
    tensors = {
        "matrix": np.arange(35, dtype=np.float32).reshape(5, 7),
        "cube": np.arange(60).reshape(3, 4, 5).astype(ml_dtypes.bfloat16),
        "vector": np.arange(9, dtype=np.int8),
        "scalar": np.full((), 3.0),
        "none": np.zeros((0, 3), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr("jaxpar.checkpoint.safetensors._MAPPED_BYTES", mapped_bytes)
    with TensorDirectory(tmp_path) as directory:
        for name, values in tensors.items():
            bounds = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)][::2] for n in values.shape]
            for box in itertools.product(*([slice(*b) for b in dim] for dim in bounds)):
                got = directory.read(name, box)
                assert got.dtype == values.dtype
                assert np.array_equal(got, values[box])
                got[...] = 0  # an array of its own, which stays when the file is closed


def test_resident_memory_does_not_grow_with_the_file(tmp_path):
    types = {"w": jax.ShapeDtypeStruct((300, 2**20), np.uint8)}
    with TensorFilesWriter(tmp_path, types) as writer:
        writer.mark_written("w", 0, 300)
        writer.finish()

    def resident_file_pages():
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")]
        return int(line.split()[1]) * 1024

    before, most = resident_file_pages(), 0
    with TensorDirectory(tmp_path) as directory:
        for _, box in row_slabs(types["w"], 8 * 2**20):
            directory.read("w", box)
            most = max(most, resident_file_pages() - before)
    assert most < 100 * 2**20


# --- dtypes -----------------------------------------------------------------------------------------------------------


def one_tensor(directory: Path, values: np.ndarray) -> Path:
    save_file({"w": values}, directory / "model.safetensors")
    return directory


def read_one(directory, shape, wanted, **options):
    target = jax.ShapeDtypeStruct(shape, wanted, sharding=NamedSharding(MESH, P("fsdp")))
    return read_tensors(directory, {("w",): TensorSource("w", "a b -> b a")}, {("w",): target}, **options)["w",]


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_dtype_changes_only_on_request(tmp_path, stored, wanted):
    values = np.random.default_rng(0).standard_normal((4, 6)).astype(stored)
    one_tensor(tmp_path, values)
    if stored != wanted:
        names = rf"w: {np.dtype(stored)} in the checkpoint, {np.dtype(wanted)} expected[\s\S]*dtype="
        with pytest.raises(CheckpointError, match=names):
            read_one(tmp_path, (6, 4), wanted)
    got = read_one(tmp_path, (6, 4), wanted, **({"dtype": wanted} if stored != wanted else {}))
    assert got.dtype == wanted
    assert np.array_equal(np.asarray(got), values.T.astype(wanted))


def test_conversion_is_for_floats_and_to_the_target(tmp_path):
    one_tensor(tmp_path, np.ones((4, 6), np.int32))
    with pytest.raises(CheckpointError, match="cannot be converted: w: int32"):
        read_one(tmp_path, (6, 4), np.float32, dtype=np.float32)
    with pytest.raises(ValueError, match="parameter w is float32, but dtype = bfloat16 is asked for"):
        read_one(tmp_path, (6, 4), np.float32, dtype=jnp.bfloat16)


# --- errors -----------------------------------------------------------------------------------------------------------


def change(directory: Path, update) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    update(tensors)
    save_file(tensors, path)


def test_one_message_lists_missing_unexpected_and_wrong_shapes(llama):
    def update(tensors):
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        tensors["model.norm.weight"] = np.zeros(60, np.float32)
        tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((64, 32), np.float32)

    change(llama, update)
    with pytest.raises(CheckpointError) as caught:
        read(llama)
    for line in (
        "missing from the checkpoint: model.layers.2.mlp.up_proj.weight: float32[112,64]",
        "unexpected in the checkpoint: model.layers.0.self_attn.q_proj.bias: float32[64]",
        "wrong shape: model.norm.weight: float32[60] in the checkpoint, float32[64] expected",
        "model.layers.1.self_attn.k_proj.weight: float32[64,32] in the checkpoint, float32[32,64] expected",
        str(llama),
    ):
        assert line in str(caught.value)


def test_another_number_of_layers_is_an_error_both_ways(llama):
    params = independent_parameters(load_file(llama / "model.safetensors"), "llama")
    for num_layers, kind in ((3, "unexpected in the checkpoint"), (5, "missing from the checkpoint")):
        targets = {
            path: jax.ShapeDtypeStruct((num_layers, *t.shape[1:]), t.dtype, sharding=t.sharding)
            if path[0] == "layers"
            else t
            for path, t in targets_of(params).items()
        }
        with pytest.raises(CheckpointError, match=rf"{kind}: model\.layers\.{min(num_layers, 4)}\.mlp") as caught:
            read(llama, targets=targets)
        assert len(str(caught.value).splitlines()) == 9 + 2


def test_a_long_list_is_cut_with_its_length(llama):
    change(llama, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    with pytest.raises(CheckpointError, match="missing from the checkpoint: and 16 more"):
        read(llama)


def test_a_vocabulary_of_another_size_is_not_taken_for_padding(llama):
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight: float32\[160,64\] in the checkpoint, float32\[200,64\]"
    ):
        read(llama, unpadded={"vocab": 200})


def test_harmless_tensors_are_ignored_and_a_copy_of_a_tied_head(tmp_path):
    shutil.copy(ORACLE / "llama31" / "model.safetensors", tmp_path)

    def update(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    change(tmp_path, update)
    assert ("head",) not in read(tmp_path, family="llama31")
    with pytest.raises(CheckpointError, match=r"unexpected in the checkpoint: lm_head\.weight"):
        read(tmp_path, family="llama31", ignored=ignored(tied=False))


def test_a_directory_without_safetensors_says_what_is_there(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"neither .*: it has pytorch_model.bin\n-> .*safe_serialization"):
        TensorDirectory(tmp_path)
    with pytest.raises(CheckpointError, match="it does not exist"):
        TensorDirectory(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="it is empty"):
        TensorDirectory(tmp_path / "empty")


def test_an_index_that_does_not_match_its_files_is_named(tmp_path):
    directory = as_index(ORACLE / "llama" / "model.safetensors", tmp_path / "x")
    second = directory / "model-00002-of-00003.safetensors"
    kept = second.rename(directory / "elsewhere")
    with pytest.raises(CheckpointError, match=r"index.json names files that do not exist .*: model-00002-of-00003"):
        read(directory)
    tensors = load_file(kept)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, second)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-00003.safetensors lacks tensors .*: {lost}"):
        read(directory)
    (directory / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        read(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda data: data[:-1000], "not a readable safetensors file"),
        (lambda data: b"", "not a readable safetensors file"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n", "git lfs pull"),
    ],
    ids=["truncated", "empty", "pointer"],
)
def test_a_damaged_file_is_named(llama, content, message):
    path = llama / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"model.safetensors [\s\S]*{message}|{message}"):
        read(llama)


def test_plan_and_targets_must_belong_together(llama):
    params = independent_parameters(load_file(llama / "model.safetensors"), "llama")
    targets = targets_of(params)
    extra = targets | {("layers", "q_bias"): targets["final_norm",]}
    with pytest.raises(ValueError, match="only in the key map: none; only in the model: layers/q_bias"):
        read(llama, targets=extra)
    flat = targets | {("layers", "q"): targets["final_norm",]}
    with pytest.raises(ValueError, match="parameter layers/q has shape"):
        read(llama, targets=flat)
    unsharded = targets | {("final_norm",): jax.ShapeDtypeStruct((64,), np.float32)}
    with pytest.raises(ValueError, match="parameter final_norm: the target has no sharding"):
        read(llama, targets=unsharded)
    with pytest.raises(ValueError, match="smaller than the true size of"):
        read(llama, unpadded={"vocab": VOCAB_PADDED + 1})


@pytest.mark.parametrize(
    ("name", "rule"),
    [("t.{layer}", "a b -> a b"), ("t", "a b -> a"), ("t", "a -> a b"), ("t", "a a -> a"), ("t", "a b -> a b b")],
)
def test_a_rule_that_loses_or_invents_a_dim_is_refused(name, rule):
    with pytest.raises(ValueError, match="does not account for every dim exactly once"):
        TensorSource(name, rule)
