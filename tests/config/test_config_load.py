"""Loading: merge order, origins, and errors that name the key, the value and the remedy."""

import pickle
from pathlib import Path

import pytest

from jaxpar.config import ConfigError, load_config, load_with_sources

TINY = ("model.embed_dim=64", "model.num_layers=2", "model.num_heads=4", "model.mlp_dim=128")


def problems_of(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return {problem.key: problem for problem in caught.value.problems}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_later_layers_win_and_every_origin_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        Path("configs/x.toml"),
        '# heading\n[model]\npreset = "llama-3.1-8b"\nnum_layers = 4\nrope_scaling.factor = 16\n\n'
        "[optim]\nlr = 1e-3\nwarmup_steps = 7\n",
    )
    loaded = load_with_sources("configs/x.toml", ["optim.lr=3e-4", "run.dir=runs/x"])
    config, sources = loaded.config, loaded.sources
    assert (config.model.embed_dim, sources["model.embed_dim"]) == (4096, "preset llama-3.1-8b")
    assert (config.model.num_layers, sources["model.num_layers"]) == (4, "configs/x.toml:4")
    assert config.model.rope_scaling.factor == 16
    assert sources["model.rope_scaling.factor"] == "configs/x.toml:5"
    assert config.model.rope_scaling.original_max_positions == 8192
    assert sources["model.rope_scaling.original_max_positions"] == "preset llama-3.1-8b"
    assert (config.optim.lr, sources["optim.lr"]) == (3e-4, "override")
    assert (config.optim.warmup_steps, sources["optim.warmup_steps"]) == (7, "configs/x.toml:9")
    assert (config.run.dir, sources["run.dir"]) == ("runs/x", "override")
    assert (config.train.steps, sources["train.steps"]) == (100, "default")


def test_derived_dims_are_filled_in_with_their_origin():
    loaded = load_with_sources(None, TINY)
    assert (loaded.config.model.num_kv_heads, loaded.sources["model.num_kv_heads"]) == (4, "model.num_heads")
    assert loaded.config.model.head_dim == 16
    assert loaded.sources["model.head_dim"] == "model.embed_dim / model.num_heads"
    assert loaded.config.model.vocab_size == 257
    assert loaded.sources["model.vocab_size"] == 'data.tokenizer = "bytes"'


def test_vocabulary_of_a_tokenizer_file_waits_for_the_file():
    assert load_config(None, [*TINY, "data.tokenizer=tokenizer.json"]).model.vocab_size == 0


def test_line_numbers_survive_arrays_strings_and_comments(tmp_path):
    path = write(
        tmp_path / "x.toml",
        '[data]\nsource = "text"\npaths = [\n  "a = 1",\n  "[train]", # ] = 3\n]\nseq_len = 32\n'
        '[run]\ndir = """\nsteps = 5\n"""\n[ train ]\n"steps" = 9\n' + _model_table(),
    )
    sources = load_with_sources(path).sources
    assert sources["data.paths"] == f"{path}:3"
    assert sources["data.seq_len"] == f"{path}:7"
    assert sources["train.steps"] == f"{path}:13"


def _model_table() -> str:
    return "[model]\n" + "\n".join(pair.removeprefix("model.") for pair in TINY) + "\n"


@pytest.mark.parametrize(
    ("argument", "section", "name", "value"),
    [
        ("mesh.fsdp=8", "mesh", "fsdp", 8),
        (" mesh.fsdp = -1 ", "mesh", "fsdp", -1),
        ("optim.lr=3e-4", "optim", "lr", 3e-4),
        ("optim.lr=1", "optim", "lr", 1.0),
        ('data.paths=["a.txt", "b*.txt"]', "data", "paths", ("a.txt", "b*.txt")),
        ("run.dir=runs/x", "run", "dir", "runs/x"),
        ('run.dir="runs/x y"', "run", "dir", "runs/x y"),
        ("run.dir=2024-01-01", "run", "dir", "2024-01-01"),
        ("run.dir=7", "run", "dir", "7"),
        ("run.dir=a=b", "run", "dir", "a=b"),
        ("run.dir=none", "run", "dir", "none"),
        ("train.remat=none", "train", "remat", "none"),
        ("train.stop_at=none", "train", "stop_at", None),
        ("runtime.coordinator=none", "runtime", "coordinator", None),
        ("runtime.coordinator=localhost:80", "runtime", "coordinator", "localhost:80"),
        ('observe.wandb_project="none"', "observe", "wandb_project", "none"),
        ("data.shuffle=false", "data", "shuffle", False),
    ],
)
def test_override_values(argument, section, name, value):
    found = getattr(getattr(load_config(None, [*TINY, argument]), section), name)
    assert found == value
    assert type(found) is type(value)


def test_rope_scaling_of_a_preset_can_be_changed_and_removed(tmp_path):
    assert load_config(None, ["model.preset=llama-3.1-8b", "model.rope_scaling=none"]).model.rope_scaling is None
    path = write(tmp_path / "x.toml", '[model]\npreset = "llama-3.1-8b"\nrope_scaling = "none"\n')
    assert load_config(path).model.rope_scaling is None
    again = load_config(path, ["model.rope_scaling={factor=2, original_max_positions=64}"]).model.rope_scaling
    assert (again.factor, again.original_max_positions, again.high_freq_factor) == (2, 64, 4)


@pytest.mark.parametrize(
    ("argument", "suggestion"),
    [
        ("train.lr=1", "optim.lr"),
        ("optim.learning_rate=1", "optim.lr"),
        ("mesh.fsd=8", "mesh.fsdp"),
        ("mesh.tp=8", "mesh.tensor"),
        ("model.name=x", "model.preset"),
        ("model.hidden_size=8", "model.embed_dim"),
        ("train.batch_size=8", "train.global_batch_size"),
        ("optimizer.lr=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("data.seqlen=1", "data.seq_len"),
        ("model.rope_scaling.fact=1", "model.rope_scaling.factor"),
    ],
)
def test_unknown_key_names_the_nearest(argument, suggestion):
    key = argument.partition("=")[0]
    problem = problems_of(None, [*TINY, argument])[key]
    assert "unknown key" in problem.message
    assert suggestion in problem.remedy


def test_unknown_key_that_is_like_nothing_lists_what_there_is():
    assert "fsdp_strategy" in problems_of(None, [*TINY, "mesh.qqqqq=1"])["mesh.qqqqq"].remedy
    assert "optim" in problems_of(None, [*TINY, "qqqqq.zzzzz=1"])["qqqqq.zzzzz"].remedy


@pytest.mark.parametrize(
    ("argument", "value", "accepted"),
    [
        ("train.steps=0", 0, "an integer >= 1"),
        ("train.steps=8.0", 8.0, "an integer >= 1"),
        ("train.steps=true", True, "an integer >= 1"),
        ('train.steps="8"', "8", "an integer >= 1"),
        ("train.stop_at=0", 0, "an integer >= 1"),
        ("optim.lr=inf", float("inf"), "a number >= 0"),
        ("optim.lr=-1", -1, "a number >= 0"),
        ("optim.b1=1.0", 1.0, "a number >= 0 and < 1"),
        ("data.shuffle=1", 1, "true or false"),
        ('data.paths="a.txt"', "a.txt", "a list of strings"),
        ("data.paths=[1]", [1], "a list of strings"),
        ("mesh.fsdp_strategy=half", "half", '"full", "grads", "optimizer"'),
        ("runtime.memory_fraction=1.5", 1.5, "a number > 0 and <= 1"),
    ],
)
def test_value_that_is_not_accepted(argument, value, accepted):
    key = argument.partition("=")[0]
    problem = problems_of(None, [*TINY, argument])[key]
    assert problem.value == value
    assert accepted in problem.message
    assert "override" in problem.message


def test_all_problems_are_reported_at_once(tmp_path):
    path = write(
        tmp_path / "x.toml", '[optim]\nbogus = 1\n[train]\nsteps = "x"\nremat = "ful"\n[model]\npreset = "llama-9"\n'
    )
    problems = problems_of(path, ["mesh.data=x", "mesh.fsdp", "run.seed=-1"])
    assert set(problems) == {
        "optim.bogus",
        "train.steps",
        "train.remat",
        "model.preset",
        "mesh.data",
        "mesh.fsdp",
        "run.seed",
    }
    assert f"{path}:4" in problems["train.steps"].message
    assert "full" in problems["train.remat"].remedy
    assert "llama" in problems["model.preset"].remedy


def test_problem_text_has_key_value_message_and_remedy():
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*TINY, "train.steps=0"])
    text = str(caught.value)
    assert text.startswith("train.steps = 0: ")
    assert "\n    -> " in text
    assert "pydantic" not in text


def test_the_error_survives_another_process():
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*TINY, "train.steps=0", "fsdp"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert str(again) == str(caught.value)


def test_syntax_error_names_file_line_and_text(tmp_path):
    path = write(tmp_path / "x.toml", "[train]\nsteps = 3\nlr = = 3\n")
    (problem,) = problems_of(path).values()
    assert problem.key == f"{path}:3"
    assert problem.value == "lr = = 3"
    assert "not valid TOML" in problem.message


@pytest.mark.parametrize("text", ["[train", "a = [1,", 'a = "x', "[train]\nsteps = 1\nsteps = 2", "a = " + "[" * 5000])
def test_other_syntax_errors_name_the_file(tmp_path, text):
    path = write(tmp_path / "x.toml", text)
    assert any(key.startswith(str(path)) for key in problems_of(path))


def test_unreadable_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("configs/tiny.toml"), _model_table())
    write(Path("configs/notes.txt"), "")
    missing = problems_of("configs/tin.toml")["configs/tin.toml"]
    assert "configs/tiny.toml" in missing.remedy
    assert "notes.txt" not in missing.remedy
    assert "configs/tiny.toml" in problems_of("elsewhere/x.toml")["elsewhere/x.toml"].remedy
    assert "cannot be read" in problems_of("configs")["configs"].message
    Path("latin.toml").write_bytes(b'a = "\xe9"')
    assert "UTF-8" in problems_of("latin.toml")["latin.toml"].message


def test_overriding_a_key_twice_names_both():
    problem = problems_of(None, [*TINY, "mesh.fsdp=8", "mesh.fsdp=4"])["mesh.fsdp"]
    assert "mesh.fsdp=8" in problem.message
    assert "mesh.fsdp=4" in problem.message
    assert "model.rope_scaling.factor" in problems_of(
        None, [*TINY, "model.rope_scaling=none", "model.rope_scaling.factor=8"]
    )


@pytest.mark.parametrize(
    "argument", ["fsdp", "=3", "mesh.fsdp=", "mesh.fsdp=[", 'run.dir="x', "mesh=3", "model.rope_scaling=3"]
)
def test_malformed_overrides_are_problems(argument):
    problems_of(None, [*TINY, argument])


def test_list_without_quotes_shows_how_to_write_it():
    problem = problems_of(None, [*TINY, "data.paths=[a.txt,b.txt]"])["data.paths"]
    assert """'data.paths=["a.txt", "b.txt"]'""" in problem.remedy


def test_missing_dims_say_what_to_set():
    problems = problems_of(None, ["model.embed_dim=64"])
    assert set(problems) == {"model.num_layers", "model.num_heads", "model.mlp_dim"}
    assert "set model.num_layers" in problems["model.num_layers"].remedy
    assert "model.preset" in problems["model.num_layers"].remedy


def test_missing_dims_are_reported_beside_other_problems():
    assert {"train.steps", "model.embed_dim"} <= set(problems_of(None, ["train.steps=0", "optim.lr=x"]))


def test_heads_that_do_not_divide_need_a_head_dim():
    overrides = ["model.embed_dim=64", "model.num_layers=2", "model.num_heads=6", "model.mlp_dim=128"]
    assert "64" in problems_of(None, overrides)["model.num_heads"].message
    assert load_config(None, [*overrides, "model.head_dim=16"]).model.head_dim == 16


def test_explicit_dims_win_over_a_preset():
    model = load_config(None, ["model.preset=qwen3-8b", "model.num_layers=2"]).model
    assert (model.num_layers, model.embed_dim, model.family) == (2, 4096, "qwen3")


def test_expert_width_of_zero_is_the_mlp_width():
    loaded = load_with_sources(None, [*TINY, "model.num_experts=4", "model.top_k=2"])
    assert loaded.config.model.expert_mlp_dim == loaded.config.model.mlp_dim
    assert loaded.sources["model.expert_mlp_dim"] == "model.mlp_dim"


def test_values_that_toml_cannot_hold_are_refused():
    assert "64 bits" in problems_of(None, [*TINY, f"train.steps={2**63}"])["train.steps"].message
    assert "Unicode" in problems_of(None, [*TINY, "run.dir=a\udcff"])["run.dir"].message
