"""Errors about what the user wrote, each naming the key, the value and the remedy."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class _NotAValue(enum.Enum):
    """Marks a problem that is about a key, a file or an argument as a whole."""

    NO_VALUE = enum.auto()


NO_VALUE = _NotAValue.NO_VALUE
"""``Problem.value`` when there is no value to show."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a config."""

    key: str
    """Dotted config key, e.g. ``mesh.tensor``; or the file or argument that could not be read."""
    value: object = NO_VALUE
    """What was given; printed with ``repr``."""
    message: str
    """What is wrong, with the numbers that make it so."""
    remedy: str
    """What would work."""

    def __str__(self) -> str:
        given = "" if self.value is NO_VALUE else f" = {self.value!r}"
        return f"{self.key}{given}: {self.message}\n    -> {self.remedy}"


class ConfigError(ValueError):
    """The config cannot be run. Carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple:
        # Exceptions are rebuilt from their text by default; this one is rebuilt from its problems.
        return ConfigError, (self.problems,)
