"""Parsing of HLO text: types, nested tuples, instructions, the walk."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.audit.hlo import ArrayType, array_types, parse_module, tuple_elements

DTYPES = {
    "pred": np.bool_,
    "s8": np.int8,
    "u32": np.uint32,
    "s64": np.int64,
    "f16": np.float16,
    "bf16": jnp.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "c64": np.complex64,
    "f8e4m3fn": jnp.float8_e4m3fn,
}

ARRAYS = st.builds(ArrayType, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=4).map(tuple))


@settings(deadline=None, max_examples=50)
@given(ARRAYS)
def test_bytes_are_those_of_numpy(array):
    assert array.bytes == math.prod(array.dims) * np.dtype(DTYPES[array.dtype]).itemsize


@pytest.mark.parametrize(("text", "expected"), [("s4[7]", 4), ("u2[8]", 2), ("token[]", 0), ("f4e2m1fn[3,2]", 3)])
def test_types_without_a_numpy_size(text, expected):
    assert array_types(text)[0].bytes == expected


def with_layout(array):
    order = ",".join(str(dim) for dim in reversed(range(len(array.dims))))
    return f"{array}{{{order}:T(8,128)(2,1)S(5)}}" if array.dims else str(array)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(ARRAYS, st.lists(ARRAYS, min_size=1, max_size=3)), min_size=1, max_size=7))
def test_nested_tuples_with_layouts_and_index_comments(elements):
    texts = [
        with_layout(element) if isinstance(element, ArrayType) else f"({', '.join(map(with_layout, element))})"
        for element in elements
    ]
    commented = [f"/*index={i}*/{text}" if i and i % 5 == 0 else text for i, text in enumerate(texts)]
    result = f"({', '.join(commented)})"
    assert tuple_elements(result) == tuple(commented)
    flat = [array for element in elements for array in ([element] if isinstance(element, ArrayType) else element)]
    assert array_types(result) == tuple(flat)


PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

FileNames
1 "model.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=6 end_column=6}

StackFrames
4 {file_location_id=1 parent_frame_id=1}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%inner (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %deep = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%sum
}

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%s), index=1
  %y = f32[4]{0} call(%x), to_apply=%inner
  %nested = (s32[], f32[4]{0}) while(%s), condition=%check, body=%unknown
  ROOT %t = (s32[], f32[4]{0}) tuple(%x, %y)
}

%unknown (u: (s32[], f32[4])) -> (s32[], f32[4]) {
  %u = (s32[], f32[4]{0}) parameter(0)
  ROOT %same = (s32[], f32[4]{0}) copy(%u)
}

%check (c: (s32[], f32[4])) -> pred[] {
  %c = (s32[], f32[4]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%left (l: f32[4]) -> f32[4] {
  ROOT %l = f32[4]{0} parameter(0)
}

%right (r: f32[4]) -> f32[4] {
  ROOT %r = f32[4]{0} parameter(0)
}

ENTRY %main (w: f32[4]) -> f32[4] {
  %w = f32[4]{0} parameter(0), metadata={op_name="w (the weights)" stack_frame_id=4}
  %init = (s32[], f32[4]{0}) tuple(%w, %w)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%check, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %z = f32[4]{0} get-tuple-element(%loop), index=1
  ROOT %out = f32[4]{0} conditional(%z, %z, %z), branch_computations={%left, %right}
}
"""


def test_walk_follows_loops_calls_and_branches_but_not_reducers():
    module = parse_module(PROGRAM)
    sites = {site.instruction.name: site for site in module.walk()}
    assert module.num_devices == 8
    assert " ".join(sorted(sites)) == "c deep go init l loop nested out p r s same t u w x y z"
    assert (sites["w"].trips, sites["deep"].trips) == (1, 3)
    # The condition of a loop runs once more than its body; one of unknown length counts as one.
    assert [loop.trips for loop in sites["same"].loops] == [3, None]
    assert sites["same"].trips == 3
    outer_checks = [site for site in module.walk() if site.instruction.name == "go" and len(site.loops) == 1]
    assert [site.trips for site in outer_checks] == [4]


def test_instructions_know_their_operands_and_their_origin():
    module = parse_module(PROGRAM)
    weights, init, loop, *_ = module.entry.instructions
    assert init.operands == ("w", "w")
    assert loop.called("condition", "body") == ("check", "body")
    assert weights.op_name == "w (the weights)"
    assert module.source_of(weights) == "model.py:7"
    assert module.source_of(init) == ""


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match=r"no ENTRY computation.*as_text\(\)"):
        parse_module("func.func public @main(%arg0: tensor<8xf32>)")
