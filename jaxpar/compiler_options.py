"""The options that a step is compiled with: the table's and the user's, as far as the installed compiler knows them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.schema import Config
from jaxpar.plan.compiler_options import Option, asked_options, table_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerOptions:
    """Options for ``jit(compiler_options=...)``."""

    values: Mapping[str, Option]
    notes: tuple[str, ...]
    """For the log: what is used, and what of the table the installed compiler does not know."""


def choose_options(config: Config, mesh: Mesh) -> CompilerOptions:
    """Options for a config on a mesh. Names change with every release of the compiler, so each is tried first.

    Raises:
        ConfigError: The compiler does not know an option of ``runtime.compiler_options``, or refuses its value.
    """
    asked = asked_options(config)
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    device = own[0]
    wrong = {
        name: reason
        for name, value in asked.items()
        if value is not None and (reason := refusal(device, name, value)) is not None
    }
    if wrong:
        raise ConfigError(
            [
                Problem(
                    key="runtime.compiler_options",
                    value=f"{name}={asked[name]}",
                    message=f"the compiler for {device.device_kind} of JAX {jax.__version__} refuses it: {reason}",
                    remedy="leave it out; option names change with the release",
                )
                for name, reason in wrong.items()
            ]
        )
    values, notes = {}, []
    for name, value in table_options(mesh.shape, device.platform).items():
        if name in asked:
            continue
        if refusal(device, name, value) is None:
            values[name] = value
        else:
            notes.append(f"compiler option {name} of our table is unknown to this compiler, and left out")
    values |= {name: value for name, value in asked.items() if value is not None}
    if values:
        notes.insert(0, "compiler options " + ", ".join(f"{name}={value}" for name, value in values.items()))
    return CompilerOptions(values=values, notes=tuple(notes))


@functools.cache
def refusal(device: jax.Device, name: str, value: Option) -> str | None:
    """Why the compiler of a device refuses an option; None if it takes it."""
    mesh = Mesh([device], ("alone",))
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        jax.jit(lambda x: x + 1).lower(scalar).compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        return str(error).strip().splitlines()[0]
    return None
