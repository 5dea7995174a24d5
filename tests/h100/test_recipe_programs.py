"""The recipes of configs/ as the CUDA compiler makes them, without a GPU: memory and lints as their heads say."""

import re

import pytest

from tests.experiments.test_recipes import RECIPES, recipe_plans

pytestmark = pytest.mark.proof

SENT = ("ragged-all-to-all", "expert")
EXPOSED = {
    # The norm of all gradients comes before the first update, so the last sum over data has nothing beside it.
    "llama-3.1-8b-64": {("all-reduce", "data")},
    # Rows go to their experts and back, a block has nothing else to do, and one collective runs at a time.
    "mixtral-8x7b-64": {SENT, ("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("reduce-scatter", "fsdp, expert")},
    "qwen3-30b-a3b-64": {SENT, ("reduce-scatter", "fsdp")},
    "qwen3-235b-a22b-512": {SENT, ("reduce-scatter", "fsdp"), ("reduce-scatter", "fsdp, expert")},
}
"""Collectives, (op, axes), of at least 2% of a step's bytes that nothing hides."""

WHOLE = {"qwen3-235b-a22b-512": ["params", "optimizer.0.mu", "optimizer.0.nu"]}
"""Where routers lie, which every device has whole; elsewhere they are less than 1% of the state of a device."""


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem, scope="module")
def recipe(request):
    """Path of a recipe, and its compiled step."""
    return request.param, recipe_plans.compiled(request.param)


def test_head_says_what_the_compiler_says(recipe):
    path, outcome = recipe
    told, found = recipe_plans.compiler_line_of(path), recipe_plans.compiler_line(outcome)
    assert told.partition("lints")[2] == found.partition("lints")[2]
    assert recipe_plans.numbers(told) == pytest.approx(recipe_plans.numbers(found), rel=0.02)


def test_no_lint_but_what_is_stated(recipe):
    path, outcome = recipe
    exposed, whole = (
        [lint.message for lint in outcome.lints if lint.rule == rule]
        for rule in ("collective not overlapped", "replicated state")
    )
    assert len(outcome.lints) == len(exposed) + len(whole)
    found = {re.match(r"(\S+) of .* over (.*?) \(", message).groups() for message in exposed}
    assert found == EXPOSED.get(path.stem, set())
    assert [message.partition(".layers.moe.router")[0] for message in whole] == WHOLE.get(path.stem, [])
