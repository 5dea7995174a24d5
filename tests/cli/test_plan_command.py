"""``jaxpar plan``: the keys that programs rely on, verdicts with reasons, bad input, and that it starts without JAX."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jaxpar.cli.plan import EPILOG
from jaxpar.cli.plan import plan as plan_command
from jaxpar.config import ConfigError

REPOSITORY = Path(__file__).parents[2]
LLAMA_8B = ["model.preset=llama-3.1-8b", "data.seq_len=8192", "train.global_batch_size=128", "mesh.fsdp=-1"]
ON_64 = ["--gpu", "h100", "--devices", "64"]


def run(*arguments):
    app = typer.Typer()
    app.command()(plan_command)
    return CliRunner().invoke(app, list(arguments))


def report_of(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def problems_of(*arguments):
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    return {problem.key: f"{problem.message} | {problem.remedy}" for problem in result.exception.problems}


def test_json_has_the_names_relied_on():
    report = report_of(*LLAMA_8B, *ON_64)
    assert report["params"]["total"] == report["params"]["active"] == 8_030_261_248
    parts = ("params", "grads", "optimizer", "activations", "logits", "gathered", "buffers", "reserve")
    memory = report["memory"]
    assert sum(memory[part] for part in parts) == pytest.approx(memory["total_bytes"])
    assert memory["device_bytes"] == 81559 * 2**20
    assert memory["params"] == pytest.approx(4 * 8_030_261_248 / 64, rel=0.01)
    assert memory["whole_logits"] / 2**30 == pytest.approx(7.83, abs=0.01)
    step = report["time"]
    assert step["compute_s"] + step["exposed_comm_s"] + step["bubble_s"] == pytest.approx(step["step_s"])
    tokens = 128 * 8192 / step["step_s"] / 64
    assert report["tokens_per_s_per_device"] == pytest.approx(tokens)
    assert report["mfu"] == pytest.approx(tokens * 5.147e10 / 989e12, rel=1e-3)
    assert report["flops_convention"].startswith("A: ")
    assert (report["verdict"], report["mesh"]["fsdp"]) == ("fits", 64)
    assert {row["axis"] for row in report["communication"]} == {"fsdp"}
    assert all(row.keys() >= {"rule", "message", "remedy"} for row in report["problems"])


def test_table_for_people():
    printed = run(*LLAMA_8B, *ON_64).stdout
    for text in ("8,030,261,248 parameters", "fits, ", "fsdp 64", "MFU", "convention A", "all-gather", "off by"):
        assert text in printed


def test_what_does_not_fit_says_by_how_much_and_what_mends_it():
    many_rows = [*LLAMA_8B[:2], "train.global_batch_size=512", "mesh.fsdp=8"]
    report = report_of(*many_rows, "--gpu", "h100")
    assert report["verdict"] == "does not fit"
    over = (report["memory"]["total_bytes"] - report["memory"]["device_bytes"]) / 2**30
    assert f"{over:.1f} GiB" in report["problems"][0]["message"]
    assert report["verdict_text"] == f"does not fit by {over:.1f} GiB"
    remedy = report["problems"][0]["remedy"]
    assert re.search(r"train\.microbatches=\d+.*saves \d+\.\d GiB", remedy)
    overrides = re.search(r"\(([^)]*)\)", remedy)[1].split()
    mended = report_of(
        *(o for o in many_rows if o.split("=")[0] not in {x.split("=")[0] for x in overrides}), *overrides
    )
    assert mended["verdict"] != "does not fit"


def test_axes_that_training_does_not_have_are_planned():
    report = report_of(
        "--model", "mixtral-8x7b", "mesh.expert=8", "mesh.pipeline=2", "mesh.data=2", "mesh.context=2",
        "train.microbatches=4", "train.global_batch_size=64", "data.seq_len=4096", "--gpu", "h200", "--devices", "64",
    )  # fmt: skip
    assert (report["params"]["total"], report["params"]["active"]) == (46_702_792_704, 12_879_925_248)
    assert {row["axis"] for row in report["communication"]} == {"context", "expert", "fsdp", "data", "pipeline"}
    assert report["time"]["bubble_fraction"] == pytest.approx(1 / 5)
    assert report["error_band"]["class"] == "moe"
    zero_1 = report_of(*LLAMA_8B, *ON_64, "mesh.fsdp_strategy=optimizer")
    zero_3 = report_of(*LLAMA_8B, *ON_64)
    assert zero_1["memory"]["optimizer"] == zero_3["memory"]["optimizer"]
    # Weights and gradients whole in bfloat16, instead of a few blocks and a float32 shard.
    assert zero_1["memory"]["gathered"] > 2 * 8.03e9
    # Of the blocks; the head's waits among what is whole, and the embedding's comes after the peak.
    assert zero_1["memory"]["grads"] == pytest.approx(2 * (8.03e9 - 2 * 128256 * 4096), rel=0.01)


def test_public_models_that_no_config_can_say():
    report = report_of(
        "--model", "deepseek-v3", "mesh.fsdp=-1", "mesh.expert=64", "train.global_batch_size=2048",
        "data.seq_len=4096", "--gpu", "h200", "--devices", "1024",
    )  # fmt: skip
    assert report["params"]["total"] == 671_026_404_352
    assert "did you mean deepseek-v3" in problems_of("--model", "deepseek-v4")["--model"]


def test_too_few_microbatches_are_unwise():
    report = report_of(*LLAMA_8B, *ON_64, "mesh.pipeline=4", "train.microbatches=4")
    assert report["verdict"] == "legal but unwise"
    (problem,) = [problem for problem in report["problems"] if problem["rule"] == "microbatches_per_stage"]
    assert "42.9%" in problem["message"]
    assert "train.microbatches=16" in problem["remedy"]


def test_tensor_across_nodes_is_unwise():
    report = report_of(*LLAMA_8B, *ON_64, "--nodes", "16", "mesh.tensor=8")
    assert "tensor_outside_nvlink" not in {problem["rule"] for problem in report["problems"]}
    report = report_of(*LLAMA_8B, "--gpu", "l40s", "--devices", "64", "mesh.tensor=8")
    assert "tensor_outside_nvlink" in {problem["rule"] for problem in report["problems"]}


@pytest.mark.parametrize(("weights", "verdict"), [("int4", "fits"), ("int8", "does not fit"), ("bf16", "does not fit")])
def test_70b_on_two_cards_of_24_gb_needs_4_bits(weights, verdict):
    options = ["--mode", "inference", "--gpu", "rtx4090", "--devices", "2", "--weights", weights]
    report = report_of("model.preset=llama-3.1-70b", *options)
    assert report["verdict"] == verdict
    assert report["memory"]["kv_cache"] == 2 * 80 * 8 * 128 * 2 * 4096 / 2


def test_search_has_the_names_relied_on(tmp_path):
    page = tmp_path / "search.html"
    on_16 = ["--gpu", "h100", "--devices", "16", "--nodes", "2"]
    report = report_of(*LLAMA_8B[:2], "train.global_batch_size=32", "--search", *on_16, "--html", str(page))
    assert len(report["ranked"]) > 3
    best = report["ranked"][0]
    assert best.keys() >= {"mesh", "microbatches", "remat", "schedule", "memory", "time", "mfu"}
    assert best["mesh"] == report["mesh"]
    assert all(rejection.keys() >= {"mesh", "reason"} for rejection in report["rejected"])
    assert "<h2>Search</h2>" in page.read_text(encoding="utf-8")
    again = report_of(*LLAMA_8B[:2], "train.global_batch_size=32", *best["overrides"].split(), *on_16)
    assert again["time"]["step_s"] == pytest.approx(best["time"])
    assert again["memory"]["total_bytes"] == pytest.approx(best["memory"])
    printed = run("model.preset=llama-3.2-1b", "train.global_batch_size=8", "--search", "--devices", "8").stdout
    assert all(text in printed for text in ("winner: ", "runner-up: ", "rejected", "use it: mesh.pipeline="))


def test_search_without_a_legal_mesh_or_a_device_count_says_so():
    assert "no mesh of so many devices" in problems_of(*LLAMA_8B[:2], "--search", "--devices", "13")["--devices"]
    assert "give --devices" in problems_of(*LLAMA_8B, "--search")["--devices"]
    nothing = report_of("model.preset=llama-3.1-405b", "train.global_batch_size=8", "--search", "--devices", "8")
    assert (nothing["verdict"], nothing["ranked"]) == ("does not fit", [])
    assert run("model.preset=llama-3.1-405b", "--search", "--devices", "8").exit_code == 0


@pytest.mark.parametrize("command", re.findall(r"^ +jaxpar plan (.*)$", EPILOG, re.MULTILINE))
def test_examples_of_the_help_run(command):
    assert run(*shlex.split(command)).exit_code == 0


@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_fits(config):
    assert report_of(str(config))["verdict"] != "does not fit"


def test_html_page_is_self_contained(tmp_path):
    page = tmp_path / "plan.html"
    assert run(*LLAMA_8B, *ON_64, "--html", str(page)).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 3
    assert "fits" in text
    assert not re.search(r"<script|<link|<img|src=|href=|url\(", text)


def test_cluster_file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('[cluster]\ngpu = "h100"\ndevices = 64\nnodes = 8\ninter_gb_per_s = 1\n')
    slow = report_of(*LLAMA_8B, "--cluster", str(path))
    assert (slow["num_devices"], slow["num_nodes"], slow["gpu"]) == (64, 8, "H100 SXM")
    assert slow["time"]["step_s"] > 1.5 * report_of(*LLAMA_8B, *ON_64)["time"]["step_s"]
    assert report_of(*LLAMA_8B, "--cluster", str(path), "--gpu", "b200")["gpu"] == "B200"
    path.write_text(
        '[gpu]\nname = "X1"\nmemory_gib = 48\nmemory_gb_per_s = 1000\nbfloat16_tflops = 100\nlink_gb_per_s = 50\n'
        "network_gb_per_s = 10\n"
    )
    own = report_of(*LLAMA_8B, "--cluster", str(path), "--devices", "64")
    assert (own["gpu"], own["memory"]["device_bytes"]) == ("X1", 48 * 2**30)
    assert "no published run" in own["error_band"]["note"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[cluster]\ngpu = "h1000000x"\n', "--gpu"),
        ("[cluster]\ndevice = 8\n", "cluster.device"),
        ("[cluster]\ndevices = 0\n", "cluster.devices"),
        ("[cluster]\nintra_gb_per_s = 5.0\n", "cluster.gpu"),
        ('[gpu]\nname = "x"\n', "gpu"),
        ("[nodes]\n", "cluster.toml"),
        ("[cluster\n", "cluster.toml"),
    ],
)
def test_bad_cluster_files_are_named(tmp_path, text, key):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    (found,) = problems_of(*LLAMA_8B, "--cluster", str(path), "--devices", "64")
    assert found.endswith(key)


def test_bad_input_is_named_with_a_remedy():
    assert "did you mean" in problems_of(*LLAMA_8B, "--gpu", "h10")["--gpu"]
    assert "give --devices" in problems_of(*LLAMA_8B)["--devices"]
    assert "remainder" in problems_of(*LLAMA_8B, *ON_64, "mesh.tensor=16")["model.num_kv_heads"]
    assert "do not divide" in problems_of(*LLAMA_8B, *ON_64, "--nodes", "7")["--nodes"]
    assert "not divide by 16" in problems_of("model.preset=llama-3.1-405b", "mesh.pipeline=16", "train.microbatches=16",
        "train.global_batch_size=16")["model.num_layers"].replace("do not", "not")  # fmt: skip


def test_it_starts_fast_and_without_jax():
    program = (
        "import sys\nfrom jaxpar.cli.main import main\nsys.argv = ['jaxpar', 'plan', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'jax', 'flax', 'matplotlib', 'numpy'} & set(sys.modules), 'heavy import'\n"
    )
    command = [sys.executable, "-c", program, *LLAMA_8B, *ON_64, "--json"]
    start = time.process_time(), time.perf_counter()
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    seconds = time.perf_counter() - start[1]
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["verdict"] == "fits"
    assert seconds < 10  # under 1 s on a machine that does nothing else


COMPILED = [
    "model.vocab_size=257",
    "model.embed_dim=32",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.mlp_dim=64",
    "mesh.fsdp=4",
    "data.seq_len=16",
    "train.global_batch_size=4",
]


def test_compile_reads_the_real_step():
    """On fake CPU devices, which need no wheels; the GPU programs are in tests/h100."""
    compiled = report_of(*COMPILED, "--compile", "cpu")["compiled"]
    assert "fake CPU devices" in compiled["target"]
    wanted = {"op", "axis", "loop", "trips", "count", "bytes", "dtype", "async", "overlapped", "products"}
    assert all(row.keys() == wanted for row in compiled["collectives"])
    gathers = [row for row in compiled["collectives"] if row["op"] == "all-gather" and row["loop"]]
    assert {(row["axis"], row["loop"], row["trips"], row["count"]) for row in gathers} == {
        ("fsdp", "forward", 3, 7),
        ("fsdp", "backward", 3, 7),
    }
    assert compiled["lints"] == []
    assert 0 < compiled["argument_bytes"] < compiled["peak_bytes"]
    assert compiled["difference"] == pytest.approx(compiled["arithmetic_bytes"] / compiled["peak_bytes"] - 1)


@pytest.mark.parametrize("also", [["--search"], ["--mode", "inference"], ["--model", "deepseek-v3"]])
def test_compile_is_for_one_train_step(also):
    assert "--compile" in problems_of(*LLAMA_8B, *also, *ON_64, "--compile", "cpu")
