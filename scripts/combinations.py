"""Writes docs/combinations.md: which parity tests prove a combination of axes and settings, or which rule refuses it.

Cases are read from the tables that parametrise the tests, refusals from the rules; neither is typed here.

    python -m scripts.combinations
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from jaxpar.config import AXES
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.rules import find_problems
from tests.parity.harness import parity_config
from tests.parity.test_experts import LIMITED, SIGMOID, SOFTMAX

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "combinations.md"

TEST_FILES = ("tests/parity/test_*.py", "tests/pipeline/test_pipeline_*.py", "tests/model/test_dropout.py")
"""Their tests with a parameter ``mesh`` compare training on it with one device."""
SETTINGS_OF_FILE = {"test_dropout": {"train.dropout": 0.1}, "test_router_losses": {"model.num_experts": 8}}
"""What all tests of a file have set."""
SECTIONS = ("mesh", "model", "pipeline")
"""Parameters of tests that are sections of a config."""
MODEL_TABLE = "MODELS"
"""Where a module has the models that its parameter ``name`` names."""
PARAM = type(pytest.param())

Settings = dict[str, object]
"""Values by config key: ``mesh.fsdp``."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of parameters of one test."""

    test: str
    axes: frozenset[str]
    settings: Settings


@dataclasses.dataclass(frozen=True)
class Feature:
    """A setting that could clash with mesh axes."""

    title: str
    key: str
    """The setting that tells a case that has it."""
    settings: Settings
    """What turns it on, ``key`` among it."""
    is_exact: bool = False
    """Whether only this very value of ``key`` does, not any but none."""
    axes: tuple[str, ...] = ()
    """Axes without which it means nothing."""

    def is_in(self, case: Case) -> bool:
        """Whether a parity case has it on."""
        found = case.settings.get(self.key)
        return found == self.settings[self.key] if self.is_exact else bool(found)


def _model(options: dict) -> Settings:
    return {f"model.{name}": value for name, value in options.items()}


def _exactly(title: str, settings: Settings, *axes: str) -> Feature:
    """A feature that is the first of these settings."""
    return Feature(title, next(iter(settings)), settings, is_exact=True, axes=axes)


FEATURES = (
    Feature("Mixture of experts", "model.num_experts", _model(SOFTMAX)),
    Feature("Dense first blocks of a mixture", "model.first_dense_layers", _model(SIGMOID)),
    Feature("Expert capacity", "model.capacity_factor", _model(LIMITED)),
    Feature("Dropout", "train.dropout", {"train.dropout": 0.1}),
    _exactly("ZeRO-2", {"mesh.fsdp_strategy": "grads"}, "fsdp"),
    _exactly("ZeRO-1", {"mesh.fsdp_strategy": "optimizer"}, "fsdp"),
    _exactly("Interleaved stages", {"pipeline.schedule": "interleaved", "pipeline.chunks": 2}, "pipeline"),
    Feature(
        "Layers that stages do not divide",
        "pipeline.layers_per_stage",
        {"pipeline.layers_per_stage": "balanced", "model.num_layers": 5},
        axes=("pipeline",),
    ),
    _exactly("Weights gathered once per step by stages", {"pipeline.gather": "per_step"}, "pipeline", "fsdp"),
)


def parity_cases() -> list[Case]:
    """Every case of every parity test, read from ``pytest.mark.parametrize``."""
    paths = sorted(path for pattern in TEST_FILES for path in ROOT.glob(pattern))
    modules = [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in paths]
    return [case for module in modules for case in _cases_of(module)]


def _cases_of(module: ModuleType) -> Iterator[Case]:
    stem = module.__name__.rpartition(".")[2]
    for name, function in vars(module).items():
        is_test = name.startswith("test_") and inspect.isfunction(function) and function.__module__ == module.__name__
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"] if is_test else []
        for chosen in itertools.product(*(_values(mark) for mark in marks)):
            parameters = {key: value for part in chosen for key, value in part.items()}
            if isinstance(parameters.get("mesh"), dict):
                settings = SETTINGS_OF_FILE.get(stem, {}) | _settings(module, parameters)
                used = (axis for axis in AXES if settings.get(f"mesh.{axis}", 1) > 1)
                yield Case(stem.removeprefix("test_"), frozenset(used), settings)


def _values(mark) -> list[dict]:
    """Parameters by name, of each set of one mark."""
    names, values = mark.args
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def parts(value: object) -> tuple:
        if isinstance(value, PARAM):
            return value.values
        return value if len(names) > 1 else (value,)

    return [dict(zip(names, parts(value), strict=True)) for value in values]


def _settings(module: ModuleType, parameters: dict) -> Settings:
    if "name" in parameters:
        parameters = {**parameters, "model": getattr(module, MODEL_TABLE)[parameters["name"]]}
    found = {"mesh.fsdp_strategy": parameters["strategy"]} if "strategy" in parameters else {}
    for section in SECTIONS:
        if isinstance(options := parameters.get(section), dict):
            found |= {f"{section}.{key}": value for key, value in options.items()}
    return found


def refusal(axes: frozenset[str], feature: Feature | None) -> str | None:
    """What the rules say against a tiny run with two devices on each of these axes; None if it is legal."""
    sections: dict[str, dict] = {"model": {"num_layers": 4}, "train": {"global_batch_size": 32, "microbatches": 4}}
    mixture = _model(SOFTMAX) if "expert" in axes else {}
    for key, value in {**mixture, **(feature.settings if feature else {})}.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    mesh = {axis: 2 for axis in AXES if axis in axes} | sections.pop("mesh", {})
    facts = gather_facts(parity_config(mesh, **sections), num_devices=2 ** len(axes))
    problems = find_problems(facts)
    return f"`{problems[0].key}`: {problems[0].message}" if problems else None


class Page:
    """The document, built line by line; refusals are numbered as they come."""

    def __init__(self):
        self._cases = parity_cases()
        self._refusals: list[str] = []

    def text(self) -> str:
        """All of it."""
        lines = [HEAD.strip(), "", "## Mesh axes", "", *self._matrix(None)]
        for feature in FEATURES:
            lines += ["", f"## {feature.title}", "", *self._matrix(feature)]
        lines += ["", "## Three and four axes", "", "| axes | parity cases |", "|---|---|"]
        for axes in itertools.chain(itertools.combinations(AXES, 3), itertools.combinations(AXES, 4)):
            lines.append(f"| {' x '.join(axes)} | {self._cell(frozenset(axes), None)} |")
        lines += ["", "## Refusals", "", *(f"{n}. {text}" for n, text in enumerate(self._refusals, 1))]
        return "\n".join(lines) + "\n"

    def _matrix(self, feature: Feature | None) -> Iterator[str]:
        needed = feature.axes if feature else ()
        if needed:
            yield f"On {' x '.join(needed)}, together with:"
            yield ""
        yield f"| | {' | '.join(AXES)} |"
        yield "|---" * (len(AXES) + 1) + "|"
        for row, axis in enumerate(AXES):
            cells = [self._cell(frozenset({axis, other, *needed}), feature) for other in AXES[: row + 1]]
            yield f"| **{axis}** | {' | '.join(cells + [''] * (len(AXES) - len(cells)))} |"

    def _cell(self, axes: frozenset[str], feature: Feature | None) -> str:
        found = {case.test for case in self._cases if axes <= case.axes and (feature is None or feature.is_in(case))}
        if found:
            return ", ".join(sorted(found))
        problem = refusal(axes, feature)
        if problem is None:
            return "legal, no case"
        if problem not in self._refusals:
            self._refusals.append(problem)
        return f"refused ({self._refusals.index(problem) + 1})"


HEAD = """
# Combinations

Written by `python -m scripts.combinations` from the tables of the parity tests and from the rules of the config; a
test fails when it is not current. A cell names the files of `tests/parity`, `tests/pipeline` and `tests/model` (without
`test_`) with cases that train on a mesh with these axes above 1, maybe among others, and compare with one device; what
they compare is said at their head. Otherwise it has the number of the refusal below, or says that the rules allow what
no case of its own proves. The diagonal is one axis with any others. Wherever the expert axis is, the model is a mixture
of experts.
"""


if __name__ == "__main__":
    PAGE.write_text(Page().text(), encoding="utf-8")
