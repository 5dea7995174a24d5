"""Options of the compiler: the table by mesh, what the user says over it, and entries that say nothing."""

import pytest

from jaxpar.config import AXES, ConfigError, load_config
from jaxpar.plan.compiler_options import PLAIN, WITH_CONTEXT, WITH_TENSOR, asked_options, table_options

ALONE = dict.fromkeys(AXES, 1)


def asked(*entries):
    listed = ", ".join(f'"{entry}"' for entry in entries)
    return asked_options(load_config(None, ["model.preset=llama-3.2-1b", f"runtime.compiler_options=[{listed}]"]))


@pytest.mark.parametrize(
    ("mesh", "platform", "expected"),
    [
        ({"fsdp": 8}, "gpu", PLAIN),
        ({"data": 2, "fsdp": 8}, "gpu", {}),
        ({"fsdp": 4, "tensor": 2}, "gpu", WITH_TENSOR),
        ({"expert": 8}, "gpu", PLAIN),
        ({"data": 8}, "gpu", {}),
        ({"context": 8}, "gpu", {**PLAIN, **WITH_CONTEXT}),
        ({"data": 2, "context": 4}, "gpu", WITH_CONTEXT),
        ({"fsdp": 8}, "cpu", {}),
    ],
)
def test_the_table_goes_by_the_mesh(mesh, platform, expected):
    assert table_options({**ALONE, **mesh}, platform) == expected


def test_values_have_types():
    given = asked("a=true", "b=false", "c=3", "d=0.5", "e=MODE_ON", "f=default", "g=x=y")
    assert given == {"a": True, "b": False, "c": 3, "d": 0.5, "e": "MODE_ON", "f": None, "g": "x=y"}


@pytest.mark.parametrize("entry", ["xla_flag", "=true", "xla_flag="])
def test_what_is_no_option_is_refused(entry):
    with pytest.raises(ConfigError, match="NAME=VALUE") as error:
        asked(entry)
    assert error.value.problems[0].key == "runtime.compiler_options"
