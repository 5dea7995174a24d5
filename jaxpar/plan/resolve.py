"""From a config to a resolved plan, or to one error that names everything wrong with it. Needs no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.schema import AXES, Config
from jaxpar.plan.facts import BATCH_AXES, Facts, gather_facts
from jaxpar.plan.parameters import padded_vocab_size, padding_param_count, param_count
from jaxpar.plan.rules import OWN_RULES, RULES, Rule, find_problems, find_warnings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A config that is known to be legal on a given number of devices, with all numbers filled in."""

    config: Config
    """As loaded, with the model's dimensions and vocabulary filled in; ``config.mesh`` may still hold a -1."""
    mesh: Mapping[str, int]
    """Size of each of the six axes, outermost first; their product is ``num_devices``."""
    num_devices: int
    """Devices of all processes."""
    batch_shards: int
    """Parts that the rows of a batch are split into: data x fsdp x expert."""
    rows_per_microbatch: int
    """Rows of one microbatch over all devices."""
    rows_per_device: int
    """Rows of one microbatch on one device."""
    tokens_per_step: int
    """Tokens that one optimizer step predicts: global batch x sequence."""
    padded_vocab_size: int
    """Rows of the embedding in memory; the same on every mesh."""
    num_params: int
    """Parameters of the model; vocabulary unpadded, tied embedding counted once."""
    num_padding_params: int
    """Parameters in memory on top of these, because the vocabulary is padded."""
    warnings: tuple[str, ...]
    """What is allowed and probably not meant."""


def check(
    config: Config,
    *,
    num_devices: int | None = None,
    num_rows: int | None = None,
    tokenizer_vocab_size: int | None = None,
) -> tuple[str, ...]:
    """Applies every rule for which enough is known; the others wait.

    Args:
        config: The config.
        num_devices: Devices of all processes; None before JAX has started. ``runtime.cpu_devices`` tells it too.
        num_rows: Rows of one training epoch; None before the data was read.
        tokenizer_vocab_size: Ids of the tokenizer; None before it was read.

    Returns:
        Warnings.

    Raises:
        ConfigError: Every problem found.
    """
    facts = gather_facts(config, num_devices=num_devices, num_rows=num_rows, tokenizer_vocab_size=tokenizer_vocab_size)
    return _checked(facts, RULES)


def resolve(
    config: Config,
    *,
    num_devices: int | None,
    num_rows: int | None = None,
    tokenizer_vocab_size: int | None = None,
) -> ResolvedPlan:
    """The plan of a config on a number of devices.

    Args:
        config: The config.
        num_devices: Devices of all processes. None takes ``runtime.cpu_devices``, or the product of a mesh without -1.
        num_rows: Rows of one training epoch; None if not known yet.
        tokenizer_vocab_size: Ids of the tokenizer; needed if ``model.vocab_size`` is 0 and the tokenizer is a file.

    Raises:
        ConfigError: Every problem found, among them a device count or vocabulary that the plan cannot do without.
    """
    facts = gather_facts(config, num_devices=num_devices, num_rows=num_rows, tokenizer_vocab_size=tokenizer_vocab_size)
    if problems := find_problems(facts) or _unknowns(facts):
        raise ConfigError(problems)
    model = facts.model
    return _plan(
        facts,
        tokens_per_step=facts.config.train.global_batch_size * facts.config.data.seq_len,
        padded_vocab_size=padded_vocab_size(model),
        num_params=param_count(model),
        num_padding_params=padding_param_count(model),
    )


def check_own(config: Config, *, num_devices: int | None = None, num_rows: int | None = None) -> tuple[str, ...]:
    """As ``check``, for a run with a user's own module and data."""
    facts = _own_facts(config, num_devices, num_rows)
    return _checked(facts, OWN_RULES)


def resolve_own(config: Config, *, num_devices: int, num_rows: int | None = None) -> ResolvedPlan:
    """As ``resolve``, for a run with a user's own module and data.

    What only a decoder has is 0: vocabulary, parameters. A token stands for a row.
    """
    facts = _own_facts(config, num_devices, num_rows)
    _checked(facts, OWN_RULES)
    rows = config.train.global_batch_size
    return _plan(facts, tokens_per_step=rows, padded_vocab_size=0, num_params=0, num_padding_params=0)


def _checked(facts: Facts, rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """Warnings; raises what is wrong."""
    if problems := find_problems(facts, rules):
        raise ConfigError(problems)
    return tuple(find_warnings(facts))


def _plan(facts: Facts, **numbers: int) -> ResolvedPlan:
    """The plan of legal facts; ``numbers`` are those of the model."""
    config, train = facts.config, facts.config.train
    batch_shards = facts.axes_product(BATCH_AXES)
    rows_per_microbatch = train.global_batch_size // train.microbatches
    return ResolvedPlan(
        config=config,
        mesh=facts.mesh,
        num_devices=facts.axes_product(AXES),
        batch_shards=batch_shards,
        rows_per_microbatch=rows_per_microbatch,
        rows_per_device=rows_per_microbatch // batch_shards,
        warnings=tuple(find_warnings(facts)),
        **numbers,
    )


def _own_facts(config: Config, num_devices: int | None, num_rows: int | None) -> Facts:
    facts = gather_facts(config, num_devices=num_devices, num_rows=num_rows)
    # Without what is derived from or known of token data.
    return dataclasses.replace(facts, config=config, num_rows=num_rows, tokenizer_vocab_size=None)


def _unknowns(facts: Facts) -> list[Problem]:
    """Facts that rules can wait for, but a plan cannot."""
    problems = []
    if facts.axes_product(AXES) is None:
        (axis,) = (axis for axis in AXES if axis not in facts.mesh)
        problems.append(
            Problem(
                key=f"mesh.{axis}",
                value=-1,
                message="takes the devices that the other axes leave, but the number of devices is not known here",
                remedy="give num_devices, set runtime.cpu_devices, or write the size of the axis",
            )
        )
    if not facts.model.vocab_size:
        problems.append(
            Problem(
                key="model.vocab_size",
                value=0,
                message=f"is the tokenizer's, but the size of {facts.config.data.tokenizer} is not known here",
                remedy="give tokenizer_vocab_size, or set model.vocab_size",
            )
        )
    return problems
