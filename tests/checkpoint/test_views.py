"""One checkpoint seen under the names of another: any rule, any box, both ways, and every mistake named."""

from __future__ import annotations

import itertools
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint.boxes import pieces
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.safetensors import read_tensors
from jaxpar.checkpoint.views import ExportedTensors, MappedTensors, row_slabs
from jaxpar.families.keymap import TensorSource
from tests.checkpoint.arrays import ArrayReader, whole

# --- any rule, any box ------------------------------------------------------------------------------------------------


@st.composite
def grouped(draw, factors):
    """The factors in some order, in some groups, with dims of size 1 between them."""
    order = draw(st.permutations(factors))
    groups, current = [], []
    for factor in order:
        current.append(factor)
        if draw(st.booleans()):
            groups.append(current)
            current = []
    groups += [current] if current else []
    if draw(st.integers(0, 4)) == 0:
        groups.insert(draw(st.integers(0, len(groups))), [])
    return groups


def written(groups, marks=lambda factor: factor):
    return " ".join(f"({' '.join(map(marks, group))})" for group in groups)


@st.composite
def rules(draw):
    """(source, size by factor, given sizes): stacked, merged on both sides, pinned, with skipped parts."""
    factors = list("abcd"[: draw(st.integers(1, 4))])
    pins = {name: draw(st.integers(0, 2)) for name in "xy"[: draw(st.integers(0, 2))]}
    sizes = {factor: draw(st.integers(1, 4)) for factor in factors}
    sizes |= {name: index + draw(st.integers(1, 2)) for name, index in pins.items()}
    stacked = [factor for factor in factors if draw(st.integers(0, 3)) == 0]
    dims = []
    for group in draw(grouped([f for f in factors if f not in stacked] + list(pins))):
        text = " ".join(f"{f}={pins[f]}" if f in pins else f for f in group)
        if group and draw(st.integers(0, 3)) == 0:
            before, after = draw(st.sampled_from([(["2"], []), (["3*1"], ["1"]), ([], ["a*2"]), (["1", "2"], ["1*b"])]))
            before, after = ([p.replace("b", factors[-1]) for p in parts] for parts in (before, after))
            text = " | ".join([*before, text, *after])
        dims.append(f"({text})")
    name = "t" + "".join(f".{{{factor}}}" for factor in draw(st.permutations(stacked)))
    return TensorSource(name, " ".join(dims) + " -> " + written(draw(grouped(factors)))), sizes


def element_by_element(source, sizes):
    """A parameter and its tensors by the definition of a rule: every index of the factors is looked up on its own."""
    rng = np.random.default_rng(0)
    tensors = {n: rng.integers(0, 2**31, source.source_shape(sizes)) for _, n in source.names(sizes)}
    parameter = np.zeros(source.target_shape(sizes), np.int64)
    for values in itertools.product(*(range(sizes[factor]) for factor in source.dims)):
        index = dict(zip(source.dims, values, strict=True)) | source.pinned

        def position(group, index=index):
            return int(np.ravel_multi_index([index[f] for f in group], [sizes[f] for f in group])) if group else 0

        place = []
        for dim in source.stored_dims:
            skipped = sum(math.prod(sizes.get(w) or int(w) for w in term) for term in dim.before)
            place.append(skipped + position(dim.factors))
        name = source.name.format(**index)
        parameter[tuple(position(group) for group in source.target_dims)] = tensors[name][tuple(place)]
    return parameter, tensors


@st.composite
def box_of(draw, shape):
    bounds = []
    for size in shape:
        start = draw(st.integers(0, size))
        bounds.append((start, draw(st.integers(start, size))))
    return tuple(slice(*b) for b in bounds)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_every_box_under_every_rule(data):
    source, sizes = data.draw(rules())
    parameter, tensors = element_by_element(source, sizes)
    reader = ArrayReader(tensors)
    view = MappedTensors(
        reader, {("w",): source}, shapes={("w",): parameter.shape}, sizes=sizes, ignored=["t.*"], prefix="params/"
    )
    assert list(view.types) == ["params/w"]
    box = data.draw(box_of(parameter.shape))
    assert np.array_equal(view.read("params/w", box), parameter[box])
    assert reader.elements_read == parameter[box].size
    fewest = list(pieces(source, [(s.start, s.stop) for s in box], sizes))
    assert len(fewest) <= max(1, parameter[box].size)


@st.composite
def checkpoints(draw):
    """A key map whose parameters share tensors and fill them, with the size of every factor of each parameter."""
    plan, all_sizes = {}, {}
    for t in range(draw(st.integers(1, 2))):
        source, sizes = draw(rules().filter(lambda case: case[0].reads_whole_tensors and case[0].stored_dims))
        name = source.name.replace("t", f"t{t}", 1)
        _, _, right = source.rule.partition("->")
        words = [f"({' '.join(dim.factors)})" for dim in source.stored_dims]
        dim = draw(st.integers(0, len(words) - 1))
        body = words[dim][1:-1]
        match draw(st.sampled_from(["whole", "pinned first", "pinned last", *(["parts"] if body else [])])):
            case "whole":
                variants = [body]
            case "pinned first":
                variants = [f"p={i} {body}" for i in range(3)]
            case "pinned last":
                variants = [f"{body} p={i}" for i in range(2)]
            case "parts":
                size = math.prod(sizes[f] for f in body.split())
                first = f"({'*'.join(['1', *body.split()])} | {body})" if draw(st.booleans()) else f"({size} | {body})"
                variants = [f"{body} | _", first[1:-1]]
        for i, variant in enumerate(variants):
            rule = " ".join([*words[:dim], f"({variant})", *words[dim + 1 :]])
            plan[f"w{t}", str(i)] = TensorSource(name, f"{rule} ->{right}")
            all_sizes[f"w{t}", str(i)] = sizes
    return plan, all_sizes


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_exporting_what_was_imported_gives_every_box_of_the_tensors(data):
    plan, all_sizes = data.draw(checkpoints())
    shapes = {path: source.target_shape(all_sizes[path]) for path, source in plan.items()}
    rng = np.random.default_rng(0)
    params = {f"p/{'/'.join(path)}": rng.integers(0, 2**31, shape) for path, shape in shapes.items()}
    given_sizes = {}  # every parameter has its own sizes; those that shapes do not tell are given one by one
    for path, sizes in all_sizes.items():
        if any(len(group) > 1 for group in plan[path].target_dims):
            given_sizes |= sizes
            plan = {p: s for p, s in plan.items() if p[0] == path[0]}
            params = {n: a for n, a in params.items() if n.split("/")[1] == path[0]}
            break
    exported = ExportedTensors(ArrayReader(params | {"other/x": np.zeros(3)}), plan, sizes=given_sizes, prefix="p/")
    tensors = {name: whole(exported, name) for name in exported.types}
    assert sum(t.size for t in tensors.values()) == sum(p.size for p in params.values())
    for name, tensor in tensors.items():
        box = data.draw(box_of(tensor.shape))
        counted = ArrayReader(params)
        again = ExportedTensors(counted, plan, sizes=given_sizes, prefix="p/")
        assert np.array_equal(again.read(name, box), tensor[box])
        assert counted.elements_read == tensor[box].size
    imported = MappedTensors(ArrayReader(tensors), plan, shapes={p: shapes[p] for p in plan}, sizes=given_sizes)
    for path in plan:
        assert np.array_equal(whole(imported, "/".join(path)), params[f"p/{'/'.join(path)}"])
    through = MappedTensors(exported, plan, shapes={p: shapes[p] for p in plan}, sizes=given_sizes, prefix="p/")
    for name, values in params.items():
        box = data.draw(box_of(values.shape))
        assert np.array_equal(through.read(name, box), values[box])


def test_a_box_across_every_border_of_merged_dims():
    values = np.arange(3 * 4 * 5).reshape(3, 4, 5)
    tensors = {f"s{i}": values[i].T.copy() for i in range(3)}
    view = MappedTensors(ArrayReader(tensors), {("w",): TensorSource("s{a}", "c b -> (a b c)")}, sizes={})
    assert view.types["w"].shape == (60,)
    for start, stop in itertools.combinations(range(61), 2):
        assert np.array_equal(view.read("w", [slice(start, stop)]), values.reshape(-1)[start:stop])


def test_large_pieces_are_copied_in_tiles():
    values = np.random.default_rng(0).integers(0, 2**31, (2, 300, 5, 520))
    rule = "b (c d) a -> a (d c) b"
    view = MappedTensors(
        ArrayReader({"t": values.transpose(1, 2, 3, 0).reshape(300, 2600, 2)}),
        {("w",): TensorSource("t", rule)},
        sizes={"c": 5},
    )
    assert np.array_equal(whole(view, "w"), values.transpose(0, 3, 2, 1).reshape(2, 2600, 300))
    box = (slice(1, 2), slice(3, 2557), slice(2, 299))
    assert np.array_equal(view.read("w", box), whole(view, "w")[box])


# --- what rules can say -----------------------------------------------------------------------------------------------


def read_all(tensors, plan, **options):
    view = MappedTensors(ArrayReader(tensors), {(name,): source for name, source in plan.items()}, **options)
    return {name: whole(view, name) for name in view.types}


def test_fused_projections_of_equal_width():
    qkv = np.random.default_rng(0).standard_normal((2, 3 * 4 * 8, 16)).astype(np.float32)
    got = read_all(
        {f"h.{i}.qkv": qkv[i] for i in range(2)},
        {
            name: TensorSource("h.{layer}.qkv", f"(qkv={i} heads head_dim) embed -> layer embed heads head_dim")
            for i, name in enumerate("qkv")
        },
        sizes={"head_dim": 8, "qkv": 3},
    )
    for i, name in enumerate("qkv"):
        assert np.array_equal(got[name], qkv.reshape(2, 3, 4, 8, 16)[:, i].transpose(0, 3, 1, 2))


GQA = {
    "q": TensorSource("h.{layer}.qkv", "(heads head_dim | _) embed -> layer embed heads head_dim"),
    "k": TensorSource(
        "h.{layer}.qkv", "(heads*head_dim | kv_heads head_dim | _) embed -> layer embed kv_heads head_dim"
    ),
    "v": TensorSource("h.{layer}.qkv", "(_ | kv_heads head_dim) embed -> layer embed kv_heads head_dim"),
}


def gqa():
    """Four heads and two kv heads of width 8 in one projection of 32 + 16 + 16 rows."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 16, n, 8)).astype(np.float32) for n in (4, 2, 2))
    rows = [w.reshape(2, 16, -1).transpose(0, 2, 1) for w in (q, k, v)]
    fused = np.concatenate(rows, axis=1)
    return {"q": q, "k": k, "v": v}, {f"h.{i}.qkv": fused[i] for i in range(2)}


def test_fused_projections_of_unequal_width_both_ways():
    params, tensors = gqa()
    shapes = {(name,): value.shape for name, value in params.items()}
    got = read_all(tensors, GQA, shapes=shapes)
    assert all(np.array_equal(got[name], value) for name, value in params.items())
    plan = {(name,): source for name, source in GQA.items()}
    exported = ExportedTensors(ArrayReader(params), plan)
    assert list(exported.types) == ["h.0.qkv", "h.1.qkv"]
    for name, tensor in tensors.items():
        assert np.array_equal(whole(exported, name), tensor)
        for _, box in row_slabs(exported.types[name], 5 * 16 * 4):
            assert np.array_equal(exported.read(name, box), tensor[box])


def test_a_length_that_sibling_rules_tell_differently_must_be_given():
    rng = np.random.default_rng(0)
    fused = rng.standard_normal((9, 2))
    plan = {"a": TensorSource("t", "(n | _) c -> n c"), "b": TensorSource("t", "(2 | n | 4) c -> n c")}
    plan["d"] = TensorSource("t", "(1*n | m) c -> m c")
    shapes = {("a",): (2, 2), ("b",): (3, 2), ("d",): (4, 2)}
    got = read_all({"t": fused}, plan, shapes=shapes)
    assert np.array_equal(got["d"], fused[5:])
    with pytest.raises(CheckpointError, match="do not tell the size of n, _"):
        read_all({"t": fused}, plan | {"d": TensorSource("t", "(1*n | m | _) c -> m c")}, shapes=shapes, ignored=["t"])


def test_halves_of_a_fused_mlp_and_a_padded_vocabulary():
    gate_up, table = np.random.default_rng(0).standard_normal((2, 12, 5)), np.arange(40.0).reshape(10, 4)
    plan = {
        "gate": TensorSource("{layer}.gate_up", "(half=0 mlp) embed -> layer embed mlp"),
        "up": TensorSource("{layer}.gate_up", "(half=1 mlp) embed -> layer embed mlp"),
        "embedding": TensorSource("table", "(vocab | _) embed -> vocab embed"),
    }
    shapes = {("gate",): (2, 5, 6), ("up",): (2, 5, 6), ("embedding",): (7, 4)}
    tensors = {"table": table, "0.gate_up": gate_up[0], "1.gate_up": gate_up[1]}
    got = read_all(tensors, plan, shapes=shapes, ignored=["table"])
    assert np.array_equal(got["gate"], gate_up[:, :6].transpose(0, 2, 1))
    assert np.array_equal(got["up"], gate_up[:, 6:].transpose(0, 2, 1))
    assert np.array_equal(got["embedding"], table[:7])
    with pytest.raises(
        CheckpointError, match=r"read in part: table: 12 of 40 elements belong to no parameter .read by emb"
    ):
        read_all(tensors, plan, shapes=shapes)


def test_stages_layers_in_dim_1_neighbouring_rope_pairs_and_dims_of_size_1():
    rng = np.random.default_rng(0)
    stages, middle, pairs, one = (rng.standard_normal(s) for s in ((2, 3, 4, 5), (4, 6, 5), (4, 8), (1, 7, 1)))
    got = read_all(
        {"stages": stages, "middle": middle, "pairs": pairs, "one": one, "scalar": np.full((), 3.0)},
        {
            "stages": TensorSource("stages", "stage layer_in_stage embed mlp -> (stage layer_in_stage) embed mlp"),
            "middle": TensorSource("middle", "embed layer mlp -> layer embed mlp"),
            "pairs": TensorSource("pairs", "heads (pair half) -> heads (half pair)"),
            "one": TensorSource("one", "() embed one=0 -> embed ()"),
            "scalar": TensorSource("scalar", "->"),
        },
        sizes={"half": 2},
    )
    assert np.array_equal(got["stages"], stages.reshape(6, 4, 5))
    assert np.array_equal(got["middle"], middle.transpose(1, 0, 2))
    assert np.array_equal(got["pairs"], np.concatenate([pairs[:, ::2], pairs[:, 1::2]], 1))
    assert np.array_equal(got["one"], one.reshape(7, 1))
    assert got["scalar"].shape == ()
    assert got["scalar"] == 3


def test_stacked_names_are_counted_when_no_shape_is_known_and_may_have_leading_zeros():
    tensors = {f"layer_{i:02}.w": np.full(3, i) for i in range(12)}
    got = read_all(tensors, {"w": TensorSource("layer_{layer:02}.w", "embed -> embed layer")})
    assert np.array_equal(got["w"], np.broadcast_to(np.arange(12), (3, 12)))


def test_sharded_arrays_from_any_reader():
    params, tensors = gqa()
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, P(None, "fsdp"))
    targets = {
        (name,): jax.ShapeDtypeStruct(value.shape, ml_dtypes.bfloat16, sharding=sharding)
        for name, value in params.items()
    }
    plan = {(name,): source for name, source in GQA.items()}
    reader = ArrayReader(tensors)
    arrays = read_tensors(reader, plan, targets, dtype=ml_dtypes.bfloat16)
    for name, value in params.items():
        assert arrays[name,].sharding == sharding
        assert np.array_equal(np.asarray(arrays[name,]), value.astype(ml_dtypes.bfloat16))
    assert reader.elements_read == sum(t.size for t in tensors.values())


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "message"),
    [
        ("t", "a b", "one '->'"),
        ("t", "a -> a -> a", "one '->'"),
        ("t", "(a b -> a b", "parentheses do not match"),
        ("t", "((a) b) -> a b", "parentheses do not match"),
        ("t", "a b -> a b=1", "'b=1' on the right of '->' is not a name"),
        ("t", "a | b -> a b", "exactly one part|neither a name"),
        ("t", "a b- -> a b", "'b-' on the left of '->' is neither a name nor name=index"),
        ("t", "(a | b) -> a b", "exactly one part of"),
        ("t", "(_ | a | _) -> a", "has '_' twice"),
        ("t", "(2 3 | a) -> a", "skipped part '2 3' is neither"),
        ("t", "(-2 | a) -> a", "skipped part '-2' is neither"),
        ("t.{}", "a -> a", "braces in a tensor name"),
        ("t.{layer}", "a layer=0 -> layer a", "does not account for every dim exactly once"),
        ("t", "a=0 b -> a b", "does not account for every dim exactly once"),
        ("t", "p=0 p=1 b -> b", "does not account for every dim exactly once"),
        ("t", "(a b) -> (a a b)", "does not account for every dim exactly once"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(name, rule, message):
    with pytest.raises(ValueError, match=message):
        TensorSource(name, rule)


def misfit(tensors, source, **options):
    with pytest.raises(CheckpointError) as caught:
        read_all(tensors, {"w": source}, **options)
    return str(caught.value)


W = {"t": np.zeros((6, 5), np.float32)}


@pytest.mark.parametrize(
    ("rule", "shape", "sizes", "parts"),
    [
        ("(a b) c -> c a b", (5, 4, 2), {}, ["wrong shape: t", "float32[6,5]", "float32[8,5]", "w: (a b) c -> c a b"]),
        ("a b c -> a b c", None, {}, ["w does not fit t (rule 'a b c -> a b c')", "[6, 5]", "3 dims"]),
        ("a b -> b a", (5, 6, 1), {}, ["w does not fit", "[5, 6, 1]", "2 dims"]),
        ("(a b) c -> c a b", None, {}, ["the shapes do not tell the size of a, b", "float32[6,5]"]),
        ("(a b) c -> c a b", None, {"a": 4}, ["dim 0 of the tensor has size 6", "a 4 * b 1", "parameter unknown"]),
        ("(p=2 a) b -> a b", (3, 5), {}, ["p=2 is asked for, but p has size 2", "float32[6,5]", "parameter [3,5]"]),
        ("(p=0 a) b -> a b", (4, 5), {}, ["dim 0 of the tensor has size 6", "p 1 * a 4", "parameter [4,5]"]),
        ("(7 | a) b -> a b", (2, 5), {}, ["wrong shape: t", "float32[6,5]", "float32[9,5]"]),
        ("(_ | a) b -> a b", (7, 5), {}, ["dim 0 of the tensor has size 6", "the rest", "float32[6,5]"]),
        ("(_ | a) b -> a b", (5, 5), {}, ["read in part: t: 5 of 30 elements", "w: (_ | a) b -> a b"]),
        ("(n | a) b -> a b", None, {}, ["the shapes do not tell the size of a, n"]),
    ],
)
def test_a_rule_that_does_not_fit_names_leaf_rule_and_both_shapes(rule, shape, sizes, parts):
    shapes = None if shape is None else {("w",): shape}
    message = misfit(W, TensorSource("t", rule), shapes=shapes, sizes=sizes)
    assert all(part in message for part in parts), message


def test_missing_unexpected_and_mixed_dtypes_are_listed_together():
    tensors = {"0.t": np.zeros(3, np.float32), "1.t": np.zeros(3, np.float16), "3.t": np.zeros(3, np.float32)}
    tensors |= {"u": np.zeros(2), "0.rotary_emb.inv_freq": np.zeros(2)}
    message = misfit(tensors, TensorSource("{layer}.t", "a -> layer a"))
    assert "missing from the checkpoint: 2.t: float32[3] (w: a -> layer a)" in message
    assert "unexpected in the checkpoint: u: float64[2]" in message
    assert "wrong dtype: 1.t: float16 in the checkpoint, float32 expected" in message
    assert "the tensors of one parameter must have one dtype" in message
    assert "inv_freq" not in message
    message = misfit({"x": np.zeros(2)}, TensorSource("{layer}.t", "a -> layer a"))
    assert "w does not fit {layer}.t" in message
    assert "no tensor has such a name" in message
    assert "unexpected in the checkpoint: x" in message
    assert "t is missing" in misfit({}, TensorSource("t", "(p=0 a) -> a"), shapes={("w",): (3,)})


def test_key_map_and_parameters_must_be_the_same():
    with pytest.raises(CheckpointError, match="only in the key map: w; only in the model: v"):
        read_all(W, {"w": TensorSource("t", "a b -> a b")}, shapes={("v",): (6, 5)})
    with pytest.raises(CheckpointError, match="only in the model: v"):
        ExportedTensors(ArrayReader({"v": W["t"], "w": W["t"]}), {("w",): TensorSource("t", "a b -> a b")})


@pytest.mark.parametrize("index", [(slice(0, 6),), (slice(0, 7), slice(0, 5)), (slice(None), slice(0, 5))])
def test_a_box_outside_is_refused(index):
    view = MappedTensors(ArrayReader(W), {("w",): TensorSource("t", "a b -> a b")})
    with pytest.raises(ValueError, match=r"is not a box of a tensor of shape \[6, 5\]"):
        view.read("w", index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": None}, "k .* no parameter fills the part that '_' skips"),
        (
            {
                "k": TensorSource(
                    "h.{layer}.qkv", "(32 | kv_heads head_dim | _) embed -> layer embed (kv_heads head_dim)"
                )
            },
            "k ",
        ),
        ({"k": GQA["q"]}, "k .*dim 2 of the parameter has size 2, the rule makes it 4"),
        ({"v": GQA["k"]}, "h.{layer}.qkv .* put together by q, k, v: of .* elements .* and 256 from several"),
        ({"x": TensorSource("h.0.qkv", "a b c d -> a b c d")}, "two different names|stand for the tensor h.0.qkv"),
    ],
)
def test_an_incomplete_or_contradictory_tensor_is_not_exported(change, message):
    params, _ = gqa()
    params |= {"x": params["q"]} if "x" in change else {}
    plan = {(n,): s for n, s in (GQA | change).items() if s is not None}
    params = {name: value for name, value in params.items() if (name,) in plan}
    with pytest.raises(CheckpointError, match=message):
        ExportedTensors(ArrayReader(params), plan, sizes={"heads": 4})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: k.astype(np.float16), r"k .*: q float32\[64, 16\] for 2 layer, but k float16\[64, 16\] for 2 layer"),
        (lambda k: k[:1], r"k \[1, 16, 2, 8\] cannot be .*: q float32\[64, 16\] for 2 layer, but k .* for 1 layer"),
        (lambda k: k[:, :8], r"k \[2, 8, 2, 8\] cannot be .*: dim 1 of the tensor has size 16, the rule makes it 8"),
    ],
    ids=["dtype", "layers", "shape"],
)
def test_parameters_of_a_fused_tensor_must_agree(change, message):
    params, _ = gqa()
    params["k"] = change(params["k"])
    plan = {(name,): source for name, source in GQA.items()}
    with pytest.raises(CheckpointError, match=message):
        ExportedTensors(
            ArrayReader(params), plan, sizes={"heads": 4, "embed": 16} if params["k"].shape[1] == 16 else {}
        )


def test_sizes_that_an_export_needs_are_named():
    params, _ = gqa()
    rule = "(q_rows | kv_heads head_dim | _) embed -> layer embed kv_heads head_dim"
    plan = {(name,): source for name, source in (GQA | {"k": TensorSource("h.{layer}.qkv", rule)}).items()}
    with pytest.raises(CheckpointError, match=r"k \[2, 16, 2, 8\] cannot be .* do not tell the size of q_rows, _"):
        ExportedTensors(ArrayReader(params), plan)
    assert ExportedTensors(ArrayReader(params), plan, sizes={"q_rows": 32}).types["h.0.qkv"].shape == (64, 16)


# --- slabs ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), max_size=3), st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_slabs_cover_a_tensor_in_order_within_the_bound(shape, max_bytes):
    leaf = jax.ShapeDtypeStruct(tuple(shape), np.float32)
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    slabs = [values[box] for _, box in row_slabs(leaf, max_bytes)]
    assert all(not box or row == box[0].start for row, box in row_slabs(leaf, max_bytes))
    assert np.array_equal(np.concatenate([slab.reshape(-1) for slab in slabs] or [[]]), values.reshape(-1))
    assert all(slab.nbytes <= max_bytes or slab.ndim == 0 or slab.shape[0] == 1 for slab in slabs)
