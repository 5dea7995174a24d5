"""Properties: overrides mean what they say, config.toml loads back exactly, and no input ends in another exception."""

import contextlib
import tomllib
import typing

import annotated_types
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpar.config import PRESETS, Config, ConfigError, config_to_toml, load_config
from jaxpar.config.keys import KEYS
from jaxpar.config.overrides import split_path
from jaxpar.config.schema import ModelConfig, RopeScaling
from jaxpar.config.toml_text import toml_value

TINY = {"embed_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_dim": 128}
OVERRIDES = [f"model.{name}={value}" for name, value in TINY.items()]
# The model's own keys hang together; they are drawn by other tests.
FREE_KEYS = [key for key in KEYS.values() if key.name.split(".")[0] != "model"]


def field_of(name):
    section, leaf = name.split(".")
    return Config.__pydantic_fields__[section].annotation.__pydantic_fields__[leaf]


def constraints(name):
    """Bounds of a key, also of one that may be absent."""
    field = field_of(name)
    inner = [part for option in typing.get_args(field.annotation) for part in getattr(option, "__metadata__", ())]
    return [*field.metadata, *(bound for part in inner for bound in getattr(part, "metadata", ()))]


def bound(name, kind, default):
    found = [getattr(m, kind.__name__.lower()) for m in constraints(name) if isinstance(m, kind)]
    return found[0] if found else default


def values_of(key):
    """Any value that a key accepts."""
    if key.choices:
        return st.sampled_from(key.choices)
    if key.optional and key.accepted.startswith("an integer"):
        return st.integers(int(key.accepted.rpartition(" ")[2]), 2**63 - 1)
    if key.takes_text:
        return st.text(max_size=12)
    if key.accepted == "true or false":
        return st.booleans()
    if key.accepted.startswith("a list of any of "):
        choices = [choice.strip('"') for choice in key.accepted.removeprefix("a list of any of ").split(", ")]
        return st.lists(st.sampled_from(choices), max_size=3).map(tuple)
    if isinstance(key.default, tuple):
        items = st.text(max_size=8) if key.accepted == "a list of strings" else st.floats(5e-324, 1e300)
        return st.lists(items, max_size=3).map(tuple)
    if isinstance(key.default, int):
        return st.integers(bound(key.name, annotated_types.Ge, -(2**63)), 2**63 - 1)
    lowest = bound(key.name, annotated_types.Ge, bound(key.name, annotated_types.Gt, 0.0))
    highest = bound(key.name, annotated_types.Le, bound(key.name, annotated_types.Lt, 1e300))
    return st.floats(
        lowest,
        highest,
        exclude_min=any(isinstance(m, annotated_types.Gt) for m in constraints(key.name)),
        exclude_max=any(isinstance(m, annotated_types.Lt) for m in constraints(key.name)),
    )


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """One file that every example overwrites."""
    return tmp_path_factory.mktemp("scratch") / "x.toml"


keys_and_values = st.lists(st.sampled_from(FREE_KEYS), unique_by=lambda key: key.name, max_size=8).flatmap(
    lambda keys: st.fixed_dictionaries({key.name: values_of(key) for key in keys})
)


@settings(max_examples=120, deadline=None)
@given(keys_and_values)
@example({"run.dir": 'a"b\\\n\t\x7f\x00é\u2028 #='})
@example({"optim.lr": 5e-324, "optim.eps": 1e22, "train.z_loss": 0.1})
def test_overrides_and_config_toml_keep_every_value(scratch, given_values):
    overrides = [f"{name}={toml_value(value)}" for name, value in given_values.items()]
    config = load_config(None, OVERRIDES + overrides)
    for name, value in given_values.items():
        section, leaf = name.split(".")
        assert getattr(getattr(config, section), leaf) == value
    scratch.write_text(config_to_toml(config), encoding="utf-8", newline="")
    assert load_config(scratch) == config


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("more", [[], ["model.rope_scaling=none"], ["model.rope_scaling.factor=3"]])
def test_presets_round_trip(tmp_path, preset, more):
    config = load_config(None, [f"model.preset={preset}", *more])
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize("preset", [None, "llama-3.1-8b"])
@pytest.mark.parametrize("scaling", [None, RopeScaling(), RopeScaling(factor=2.5)])
def test_configs_made_in_python_round_trip(tmp_path, preset, scaling):
    config = Config(model=ModelConfig(preset=preset, vocab_size=5, rope_scaling=scaling, **TINY))
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config


def test_absent_values_are_left_out():
    text = config_to_toml(load_config(None, OVERRIDES))
    assert "stop_at" not in text
    assert "rope_scaling" not in text
    assert tomllib.loads(text)["mesh"]["fsdp_strategy"] == "full"


names = st.sampled_from(list(KEYS)) | st.text(alphabet="abcmesh._-= \"'", max_size=12)
texts = st.text(alphabet="0123456789.eE+-_ \"'[]{}=,#truefalsn\n\\", max_size=16) | st.text(max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(names, texts).map("=".join) | texts, max_size=4))
def test_any_arguments_load_or_raise_a_config_error(arguments):
    with contextlib.suppress(ConfigError):
        load_config(None, OVERRIDES + arguments)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.sampled_from([*KEYS, "[model]", "[model.rope_scaling]", "[[mesh]]", "=", "\n", '"', "1", "{", "none"]),
        max_size=12,
    )
)
def test_any_file_loads_or_raises_a_config_error(scratch, tokens):
    scratch.write_text(" ".join(tokens), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        load_config(scratch, OVERRIDES)


def test_command_line_is_split_into_file_and_overrides(tmp_path):
    assert split_path([]) == (None, [])
    assert split_path(["x.toml", "a.b=1"]) == ("x.toml", ["a.b=1"])
    assert split_path(["a.b=1", "c.d=2"]) == (None, ["a.b=1", "c.d=2"])
    odd = tmp_path / "lr=3.toml"
    odd.write_text("")
    assert split_path([str(odd), "a.b=1"]) == (str(odd), ["a.b=1"])
