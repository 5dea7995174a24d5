"""What the compiler says on stderr reaches us, whole, and the user too; compilations are counted."""

import os
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.audit import capture_compiler_warnings, record_compilations
from jaxpar.audit.compiler_log import find_rematerializations
from jaxpar.runtime.compiled import count_cache_use


def compile_resharding(source, target, axis_sizes, shape=(16, 16, 16)):
    """Compiles a change of sharding in automatic mode; axes are x and y."""
    mesh = Mesh(np.array(jax.devices()).reshape(axis_sizes), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def change(array):
        return jax.lax.with_sharding_constraint(jnp.sin(array) * 2, NamedSharding(mesh, target))

    array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, source))
    return jax.jit(change).lower(array).compile()


def test_involuntary_full_rematerialization_is_found_and_named(capfd):
    with capture_compiler_warnings() as warnings:
        compile_resharding(P("y", None, "x"), P(None, ("x", "y"), None), (4, 2))
    (finding,) = warnings.rematerializations
    assert finding.op_name == "jit(change)/sin"
    assert finding.global_shape == (16, 16, 16)
    assert finding.local_shape == "f32[8,16,4]"
    assert "{'x', 'y'}" in finding.target_sharding
    assert "jit(change)/sin" in str(finding)
    assert "[16, 16, 16]" in str(finding)
    # The user still sees what the compiler wrote, once.
    assert capfd.readouterr().err.count("Involuntary full rematerialization") == 1


def test_a_program_that_the_cache_holds_is_compiled_again():
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    kept = (P("y", None, "x"), P(None, ("x", "y"), None), (2, 4))
    try:
        compile_resharding(*kept)
        with count_cache_use() as use:
            compile_resharding(*kept)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    assert use.found == 1
    with capture_compiler_warnings() as warnings:
        compile_resharding(*kept)
    assert len(warnings.rematerializations) == 1


def test_a_cheap_change_of_sharding_is_clean():
    with capture_compiler_warnings() as warnings:
        compile_resharding(P("x", None, "y"), P("x", "y", None), (4, 2))
    assert warnings.rematerializations == ()
    assert warnings.hidden_by is None


OLDER_LOG = (
    "E0102 00:00:00.0 7 spmd_partitioner.cc:613] [spmd] Involuntary full rematerialization. The compiler was not able "
    "to go from sharding {devices=[2,1,4]<=[4,2]T(1,0)} to {devices=[1,8,1]<=[8]} without doing a full "
    "rematerialization of the tensor for HLO operation: %copy.3 = bf16[3,16,5]{2,1,0} copy(bf16[3,16,5]{2,1,0} "
    '%param.1), sharding={devices=[2,1,4]<=[4,2]T(1,0)}, metadata={op_name="jit(f)/mul"}. You probably want to enrich '
    "the sharding annotations to prevent this from happening."
)


def test_older_wording_and_tile_shardings():
    (finding,) = find_rematerializations(f"first line\n{OLDER_LOG}\nlast line\n")
    assert finding.op_name == "jit(f)/mul"
    assert finding.hlo_name == "copy.3"
    assert finding.global_shape == (6, 16, 20)
    assert finding.target_sharding == "{devices=[1,8,1]<=[8]}"
    replicated_last = OLDER_LOG.replace("[2,1,4]<=[4,2]T(1,0)", "[2,1,1,4]<=[4,2]T(1,0) last_tile_dim_replicate")
    assert find_rematerializations(replicated_last)[0].global_shape == (6, 16, 5)
    assert find_rematerializations(OLDER_LOG.replace("devices=[2,1,4]<=[4,2]T(1,0)", "?"))[0].global_shape is None


@pytest.mark.parametrize(("level", "hidden"), [("1", None), ("2", "TF_CPP_MIN_LOG_LEVEL=2"), ("", None)])
def test_a_log_level_that_hides_warnings_is_reported(monkeypatch, level, hidden):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with capture_compiler_warnings() as warnings:
        pass
    assert warnings.hidden_by == hidden


def fail_while_compiling():
    print("from Python", file=sys.__stderr__, flush=True)
    os.write(2, b"from C++ \xff\n")
    raise RuntimeError("compile failed")


def test_python_and_raw_writes_are_captured_in_order_and_an_error_passes_through(capfd):
    context = capture_compiler_warnings()
    with pytest.raises(RuntimeError, match="compile failed"), context as warnings:
        fail_while_compiling()
    assert warnings.text.startswith("from Python\nfrom C++ ")
    assert "from C++" in capfd.readouterr().err
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
    assert "after" not in warnings.text


def test_a_child_process_that_outlives_the_block_does_not_hold_it_up():
    with capture_compiler_warnings() as warnings:
        child = subprocess.Popen(["sleep", "60"])
        os.write(2, b"seen\n")
        started = time.monotonic()
    assert time.monotonic() - started < 10
    child.kill()
    child.wait()
    assert warnings.text == "seen\n"


def test_last_words_of_an_aborting_compiler_reach_the_user():
    script = """
        import os
        from jaxpar.audit import capture_compiler_warnings
        with capture_compiler_warnings():
            os.write(2, b"F0101 check failed: last words")
            os.abort()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode < 0
    assert "last words" in result.stderr


def test_a_step_counter_off_the_mesh_compiles_twice():
    """Optimizer state whose count is left on one device: the second step is another program. On the mesh: one."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    weights = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("fsdp")))

    def run(count):
        def train_step(state, count):
            return state * 0.9, count + 1

        compiled_step = jax.jit(train_step)
        state = weights
        with record_compilations() as compilations:
            for _ in range(3):
                state, count = compiled_step(state, count)
        return compilations

    assert run(jnp.zeros((), jnp.int32)).count("train_step") == 2
    on_mesh = run(jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, P())))
    assert on_mesh.count("train_step") == 1
    assert on_mesh.seconds("train_step") > 0
    assert on_mesh.count("another_step") == 0
    # Nothing is recorded any more after the block.
    jax.jit(lambda x: x + 1)(1.0)
    assert set(on_mesh.compile_s) == {"train_step"}
