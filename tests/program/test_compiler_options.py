"""Each option is tried on the installed compiler: unknown ones of the table are left out, the user's are refused."""

import jax
import pytest

from jaxpar import compiler_options
from jaxpar.compiler_options import choose_options
from jaxpar.config import ConfigError, load_config
from jaxpar.mesh import make_mesh

KNOWN = "xla_cpu_enable_fast_math"


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"fsdp": 8})


def config(*entries):
    listed = ", ".join(f'"{entry}"' for entry in entries)
    return load_config(None, ["model.preset=llama-3.2-1b", f"runtime.compiler_options=[{listed}]"])


def test_a_table_is_used_as_far_as_the_compiler_knows_it(mesh, monkeypatch):
    table = {KNOWN: True, "xla_no_such_option": 1}
    monkeypatch.setattr(compiler_options, "table_options", lambda mesh, platform: table)
    chosen = choose_options(config(), mesh)
    assert chosen.values == {KNOWN: True}
    used, left_out = chosen.notes
    assert used == f"compiler options {KNOWN}=True"
    assert "xla_no_such_option" in left_out
    assert choose_options(config(f"{KNOWN}=false"), mesh).values == {KNOWN: False}
    assert choose_options(config(f"{KNOWN}=default"), mesh).values == {}


def test_without_a_table_nothing_is_said(mesh):
    chosen = choose_options(config(), mesh)
    assert (chosen.values, chosen.notes) == ({}, ())


@pytest.mark.parametrize("entry", ["xla_no_such_option=1", f"{KNOWN}=perhaps"])
def test_what_the_compiler_refuses_is_an_error_of_the_config(mesh, entry):
    with pytest.raises(ConfigError) as error:
        choose_options(config(entry), mesh)
    (problem,) = error.value.problems
    assert problem.value == entry
    assert f"JAX {jax.__version__} refuses it" in problem.message
