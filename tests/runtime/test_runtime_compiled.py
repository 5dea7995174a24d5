"""Where compiled programs are kept, and that a cache never does harm."""

import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpar.runtime.compiled import MAX_BYTES, count_cache_use, keep_compiled_programs

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def jax_as_it_starts(monkeypatch):
    """JAX without a cache, and as it was before when the test has ended."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keep(setting="auto", *, run_dir=None, num_processes=1, on_cpu=True):
    return keep_compiled_programs(setting, run_dir=run_dir, num_processes=num_processes, on_cpu=on_cpu)


def test_auto_is_the_users_cache_bounded_and_told(home):
    (note,) = keep()
    (directory,) = (home / "jaxpar" / "compiled").iterdir()
    assert directory.name.startswith("cpu-")
    assert jax.config.jax_compilation_cache_dir == str(directory)
    assert jax.config.jax_compilation_cache_max_size == MAX_BYTES
    assert str(directory) in note
    assert "4 GiB" in note
    jax.config.update("jax_compilation_cache_dir", None)
    keep(on_cpu=False)  # JAX's key has the kind of GPU
    assert jax.config.jax_compilation_cache_dir == str(home / "jaxpar" / "compiled")


def test_without_xdg_it_is_below_home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    keep()
    assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path / ".cache" / "jaxpar" / "compiled"))


def test_several_processes_find_the_same_entries(home, tmp_path):
    keep(num_processes=2, run_dir=str(tmp_path / "run"))
    assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path / "run" / "compiled"))
    assert not home.exists()


def test_what_jax_was_told_before_wins_over_auto(home, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    (note,) = keep()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")
    assert "JAX_COMPILATION_CACHE_DIR" in note
    keep(str(tmp_path / "ours"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "ours")
    assert not home.exists()


def test_off_is_off(home, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    assert keep("off") == []
    assert not jax.config.jax_enable_compilation_cache
    assert not home.exists()


def test_a_directory_that_cannot_be_written_is_told(home):
    home.write_text("")
    (note,) = keep()
    assert "cannot be written: compiled programs are not kept" in note
    assert jax.config.jax_compilation_cache_dir is None


def compiled_anew(factor):
    """A program in a process that has just started, as far as JAX's own memory goes."""
    jax.clear_caches()
    compilation_cache.reset_cache()
    with count_cache_use() as use:
        program = jax.jit(lambda x: jnp.sin(x) * factor).lower(1.0).compile()
    assert float(program(0.5)) == pytest.approx(0.479425 * factor, rel=1e-4)
    return use


def entries():
    return list(Path(jax.config.jax_compilation_cache_dir).glob("*-cache"))


def test_a_second_start_compiles_nothing(home):
    keep()
    first, second, other = compiled_anew(3.0), compiled_anew(3.0), compiled_anew(4.0)
    assert not first.is_complete
    assert second.is_complete
    assert (first.found, second.found, other.found) == (0, 1, 0)
    assert len(entries()) == 2


def test_a_damaged_entry_is_compiled_again(home):
    keep()
    compiled_anew(5.0)
    (entry,) = entries()
    entry.write_bytes(entry.read_bytes()[:100])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not compiled_anew(5.0).is_complete
    assert any("compilation cache" in str(warning.message) for warning in caught)


def test_entries_of_a_process_killed_while_writing_are_removed(home):
    keep()
    compiled_anew(6.0)
    compiled_anew(7.0)
    whole, cut = entries()
    cut.write_bytes(cut.read_bytes()[:100])
    cut.with_name(cut.name.removesuffix("-cache") + "-atime").unlink()
    jax.config.update("jax_compilation_cache_dir", None)
    keep()
    assert entries() == [whole]


def test_what_was_not_used_for_longest_goes_beyond_the_bound(home, monkeypatch):
    monkeypatch.setattr("jaxpar.runtime.compiled.MAX_BYTES", 1)
    keep()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # larger than the bound itself
        compiled_anew(8.0)
    assert entries() == []
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr("jaxpar.runtime.compiled.MAX_BYTES", 2**40)
    keep()
    compiled_anew(8.0)
    (first,) = entries()
    jax.config.update("jax_compilation_cache_max_size", first.stat().st_size * 3 // 2)
    compiled_anew(9.0)
    (second,) = entries()
    assert second != first
    assert sum(os.path.getsize(path) for path in entries()) <= first.stat().st_size * 3 // 2 if first.exists() else True
