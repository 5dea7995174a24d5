"""The recipes of configs/: legal for the trainer, planned as their heads say, and their layouts change no answer."""

import importlib.util
import re
from pathlib import Path

import pytest

from jaxpar.config import load_config
from jaxpar.config.schema import AXES
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.resolve import check
from tests.cli.command import ROOT, Command

specification = importlib.util.spec_from_file_location("recipe_plans", ROOT / "scripts" / "recipe_plans.py")
recipe_plans = importlib.util.module_from_spec(specification)
specification.loader.exec_module(recipe_plans)
RECIPES = recipe_plans.recipes()


def devices(path: Path) -> int:
    return gather_facts(load_config(path)).axes_product(AXES)


def test_recipes_reach_from_one_node_to_thousands():
    assert {devices(path) for path in RECIPES} == {8, 64, 128, 512, 1024, 16384}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_head_says_what_plan_says(path):
    line = recipe_plans.LINE.search(path.read_text(encoding="utf-8"))[0]
    told = recipe_plans.numbers(line)
    assert len(told) == len(recipe_plans.numbers(recipe_plans.plan_line(path))) > 5
    assert told == pytest.approx(recipe_plans.numbers(recipe_plans.plan_line(path)), rel=0.02), (
        "python scripts/recipe_plans.py --write writes the line anew"
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_plan_and_compiler_agree_on_memory(path):
    config = load_config(path)
    plan = recipe_plans.numbers(recipe_plans.LINE.search(path.read_text(encoding="utf-8"))[0])
    reserve = (1 - config.runtime.memory_fraction) * plan[1]
    compiler = recipe_plans.numbers(recipe_plans.compiler_line_of(path))[0]
    assert plan[0] - reserve == pytest.approx(compiler, rel=0.1 if config.model.num_experts else 0.05)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_trainer_takes_it_on_as_many_devices(path, tmp_path):
    text = path.read_text(encoding="utf-8")
    source = load_config(path).data.source
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.touch()
    given = [f'data.paths=["{tmp_path}"]', *([f"data.tokenizer={tokenizer}"] if source == "text" else [])]
    check(load_config(path, given), num_devices=devices(path))
    command = re.search(r"jaxpar train (\S+)", text)[1]
    assert (ROOT / command) == path
    assert load_config(path).run.dir == f"runs/{path.stem}"


@pytest.mark.proof
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_layout_changes_no_answer(path, monkeypatch, capsys):
    result = Command(monkeypatch, capsys)("verify", str(path))
    assert result.code == 0, result.out
    assert "verified: " in result.out
