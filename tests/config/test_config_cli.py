"""``jaxpar config``: what is printed, that it loads back, and that it never starts JAX."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jaxpar.cli.config import config as config_command
from jaxpar.config import PRESETS, ConfigError, load_config
from jaxpar.config.keys import KEYS
from jaxpar.config.reference import reference_page

REPOSITORY = Path(__file__).parents[2]


def run(*arguments):
    app = typer.Typer()
    app.command()(config_command)
    return CliRunner().invoke(app, arguments)


def test_printed_config_is_toml_with_aligned_origins_and_loads_back(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('[model]\npreset = "llama-3.2-1b"\n[train]\nsteps = 7\n')
    result = run(str(path), "mesh.fsdp=-1")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    origins = {}
    for table in result.stdout.split("\n\n"):
        lines = table.splitlines()[1:]
        assert len({line.index("  # ") for line in lines if len(line.partition("  # ")[0].rstrip()) < 56}) <= 1
        origins |= {line.partition("  # ")[0].rstrip(): line.partition("  # ")[2] for line in lines}
    assert origins["steps = 7"] == f"{path}:4"
    assert origins["fsdp = -1"] == "override"
    assert origins["embed_dim = 2048"] == "preset llama-3.2-1b"
    assert origins["microbatches = 1"] == "default"
    printed = tmp_path / "printed.toml"
    printed.write_text(result.stdout)
    assert load_config(printed) == load_config(path, ["mesh.fsdp=-1"])
    assert tomllib.loads(result.stdout)["model"]["rope_scaling"]["factor"] == 32.0


def test_config_file_may_be_left_out():
    result = run("model.preset=tiny-bytes", "mesh.fsdp=2")
    assert result.exit_code == 0
    assert "fsdp = 2" in result.stdout


def test_warnings_do_not_mix_with_the_toml():
    result = run("model.preset=tiny-bytes", "precision.params=bfloat16")
    assert "warning: precision.params = 'bfloat16'" in result.stderr
    assert "warning" not in result.stdout


def test_broken_rules_are_raised_after_the_config_is_shown():
    result = run("model.preset=tiny-bytes", "mesh.tensor=3")
    assert isinstance(result.exception, ConfigError)
    assert "num_kv_heads = 4" in result.stdout
    assert any(problem.key == "model.num_kv_heads" for problem in result.exception.problems)


def test_a_config_that_cannot_be_loaded_prints_nothing():
    result = run("model.presett=tiny-bytes")
    assert isinstance(result.exception, ConfigError)
    assert result.stdout == ""


def test_json_output():
    report = json.loads(run("--json", "model.preset=tiny-bytes", "optim.decay_steps=3").stdout)
    assert report["config"]["model"]["embed_dim"] == 128
    assert report["sources"]["optim.decay_steps"] == "override"
    assert "optim.decay_steps" in report["warnings"][0]
    assert report["problems"] == []
    broken = run("--json", "model.preset=tiny-bytes", "mesh.tensor=3")
    assert "model.mlp_dim" in {problem["key"] for problem in json.loads(broken.stdout)["problems"]}


def test_presets_are_listed_with_exact_counts():
    lines = run("--presets").stdout.splitlines()
    shown = {line.split()[0]: line.split() for line in lines[1:]}
    assert set(shown) == set(PRESETS)
    assert "8,030,261,248" in shown["llama-3.1-8b"]
    assert shown["mixtral-8x7b"][-1] == "8"
    listed = json.loads(run("--presets", "--json").stdout)
    assert {row["preset"]: row["params"] for row in listed["presets"]}["qwen3-0.6b"] == 596_049_920


def test_reference_page_is_up_to_date():
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run: jaxpar config --reference > docs/config.md"
    assert run("--reference").stdout == page


def test_reference_page_documents_every_key():
    page = reference_page()
    for key in KEYS.values():
        assert key.doc, f"{key.name} has no docstring"
        assert f"| `{key.name}` | {key.accepted} |" in page


@pytest.mark.parametrize("arguments", [["model.preset=tiny-bytes"], ["--presets"], ["--reference"]])
def test_jax_is_never_imported(arguments):
    program = (
        "import sys, typer\n"
        "from jaxpar.cli.config import config\n"
        "app = typer.Typer()\n"
        "app.command()(config)\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "assert not {'jax', 'jaxlib', 'flax', 'orbax', 'grain'} & set(sys.modules), 'a heavy package was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
