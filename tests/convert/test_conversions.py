"""Checkpoints of others in and Hugging Face directories out: the same bytes, and nothing half done or written over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as orbax_v0
import pytest

from jaxpar import convert
from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.safetensors import TensorDirectory
from jaxpar.checkpoint.verify import verify_step
from jaxpar.cli.main import main
from jaxpar.config import ConfigError, load_config
from jaxpar.config.huggingface import read_model_settings
from jaxpar.convert import export, keep_side_files, plan_export, plan_hf_import
from jaxpar.reshard import reshard
from tests.parity.harness import DATA

ORACLES = ("llama", "llama31", "qwen2", "qwen3", "gemma", "gpt2")
MEMORY = 4 * 2**30


def imported(source: Path, directory: Path, **options) -> Path:
    planned = plan_hf_import(str(source), **{"mesh": None, "dtype": None, **options})
    reshard(planned, str(directory), max_memory=MEMORY)
    keep_side_files(str(source), str(directory))
    return directory


def exported(source: Path, directory: Path, *, step=None, dtype=None, tokenizer=None, **options) -> Path:
    planned = plan_export(str(source), step=step, dtype=dtype, tokenizer=tokenizer)
    return export(planned, str(directory), max_memory=MEMORY, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """The llama oracle as a jaxpar checkpoint, cut for fsdp=2 x tensor=2."""
    directory = tmp_path_factory.mktemp("llama") / "checkpoints"
    return imported(DATA / "hf" / "llama", directory, mesh={"fsdp": 2, "tensor": 2})


@pytest.mark.parametrize("name", ORACLES)
def test_an_oracle_that_comes_in_and_goes_out_is_the_same_file(name, tmp_path):
    """transformers wrote the original, so it can load the result."""
    source = shutil.copytree(DATA / "hf" / name, tmp_path / "source")
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    directory = imported(source, tmp_path / "checkpoints", mesh={"fsdp": 2})
    assert verify_step(directory / "0").faults == ()
    place = exported(directory, tmp_path / "out")
    assert (place / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert read_model_settings(place) == read_model_settings(source)
    assert (place / "tokenizer.json").read_text() == '{"version": "1.0"}'
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (place, source))
    # transformers' own keys are kept, token ids among them; only the older spellings of two keys are added
    assert {key: value for key, value in ours.items() if key in theirs} == theirs
    assert set(ours) - set(theirs) <= {"rope_theta", "rope_scaling", "torch_dtype", "head_dim"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out", "source"]


def test_a_config_takes_its_model_from_an_imported_checkpoint(llama):
    config = load_config(None, [f"model.init_from=jaxpar:{llama}"])
    expected = read_model_settings(DATA / "hf" / "llama")
    assert {name: getattr(config.model, name) for name in ("embed_dim", "num_layers", "vocab_size", "family")} == {
        name: expected[name] for name in ("embed_dim", "num_layers", "vocab_size", "family")
    }


def test_types_are_converted_on_request_only(llama, tmp_path):
    place = exported(llama, tmp_path / "out", dtype="bfloat16")
    with TensorDirectory(DATA / "hf" / "llama") as theirs, TensorDirectory(place) as ours:
        assert list(ours.types) != []
        assert ours.types.keys() == theirs.types.keys()
        for name, leaf in theirs.types.items():
            box = tuple(slice(0, size) for size in leaf.shape)
            values = ours.read(name, box)
            assert values.dtype.name == "bfloat16"
            assert np.array_equal(values, theirs.read(name, box).astype(values.dtype))
    assert json.loads((place / "config.json").read_text())["torch_dtype"] == "bfloat16"


class Killed(BaseException):
    """Stands in for a kill: nothing catches it."""


def test_an_export_that_was_killed_goes_on_where_it_was(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_SYNC_BYTES", 1)
    planned = plan_export(str(llama), step=None, dtype=None, tokenizer=None)
    total, told = planned.num_bytes, 0

    def until_half_is_written(num_bytes: int) -> None:
        nonlocal told
        told += num_bytes
        if told > 1.5 * total:
            raise Killed

    with pytest.raises(Killed):
        exported(llama, tmp_path / "out", progress=until_half_is_written)
    assert not (tmp_path / "out").exists()
    with (tmp_path / "out.unfinished" / "export.journal").open("a") as journal:
        journal.write('["model.la')
    read: list[str] = []
    original = convert.ExportedTensors.read
    monkeypatch.setattr(
        convert.ExportedTensors, "read", lambda self, name, box: read.append(name) or original(self, name, box)
    )
    place = exported(llama, tmp_path / "out")
    assert 0 < len(read) < 0.7 * len(planned.types)
    assert (place / "model.safetensors").read_bytes() == (DATA / "hf/llama/model.safetensors").read_bytes()
    assert not (tmp_path / "out.unfinished").exists()
    assert "export.journal" not in {path.name for path in place.iterdir()}


def test_an_unfinished_export_of_something_else_is_not_gone_on_with(llama, tmp_path):
    def at_once(num_bytes: int) -> None:
        if (tmp_path / "out.unfinished").exists():
            raise Killed

    with pytest.raises(Killed):
        exported(llama, tmp_path / "out", progress=at_once)
    with pytest.raises(CheckpointError, match="unfinished export of something else"):
        exported(llama, tmp_path / "out", dtype="bfloat16")


def test_damage_in_the_source_is_not_exported(llama, tmp_path):
    damaged = shutil.copytree(llama, tmp_path / "damaged")
    q = StepArrays(llama / "0").read("params/layers/q", [slice(1, 2), slice(3, 4), slice(0, 1), slice(0, 1)])
    data = max((damaged / "0").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = next(path for path in (damaged / "0").rglob("d/*") if q.tobytes() in path.read_bytes())
    content = bytearray(data.read_bytes())
    content[content.index(q.tobytes())] ^= 1
    data.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"params/layers/q of .*: its data is not what was saved"):
        exported(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(CheckpointError, match="is there already; nothing is overwritten"):
        exported(llama, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert (exported(llama, tmp_path / "empty") / "model.safetensors").exists()


# --- other trainers' Orbax checkpoints --------------------------------------------------------------------------------

KEY_MAP = """
ignore = ["items/opt_state/.*", "items/step"]

[params]
embedding = { from = "items/params/params/token_embedder/embedding", rule = "vocab embed -> vocab embed" }
final_norm = { from = "items/params/params/decoder/decoder_norm/scale", rule = "embed -> embed" }
head = { from = "items/params/params/decoder/logits_dense/kernel", rule = "embed vocab -> embed vocab" }

[params.layers]
attention_norm = { from = "items/params/params/decoder/layers/pre_norm/scale", rule = "embed layer -> layer embed" }
mlp_norm = { from = "items/params/params/decoder/layers/post_norm/scale", rule = "embed layer -> layer embed" }
q = { from = "items/params/params/decoder/layers/query/kernel", rule = "embed layer heads head_dim -> layer embed heads head_dim" }
k = { from = "items/params/params/decoder/layers/kv/kernel", rule = "embed layer kv=0 heads head_dim -> layer embed heads head_dim" }
v = { from = "items/params/params/decoder/layers/kv/kernel", rule = "embed layer kv=1 heads head_dim -> layer embed heads head_dim" }
o = { from = "items/params/params/decoder/layers/out/kernel", rule = "heads layer head_dim embed -> layer heads head_dim embed" }
gate = { from = "items/params/params/decoder/layers/mlp/wi_{layer}", rule = "embed (part=0 mlp) -> layer embed mlp" }
up = { from = "items/params/params/decoder/layers/mlp/wi_{layer}", rule = "embed (part=1 mlp) -> layer embed mlp" }
down = { from = "items/params/params/decoder/layers/mlp/wo", rule = "stage mlp sub embed -> (stage sub) mlp embed" }
"""  # noqa: E501


@pytest.fixture(scope="module")
def foreign(llama, tmp_path_factory) -> Path:
    """The llama oracle as another trainer may hold it: layers on dim 1, k and v fused, gate and up fused per layer."""
    arrays = StepArrays(llama / "0")

    def param(name: str) -> np.ndarray:
        return arrays.read(f"params/{name}", [slice(0, size) for size in arrays.types[f"params/{name}"].shape])

    def layers_second(name: str) -> np.ndarray:
        return np.moveaxis(param(f"layers/{name}"), 0, 1)

    down = param("layers/down")
    num_layers, mlp, embed = down.shape
    fused = np.concatenate([param("layers/gate"), param("layers/up")], axis=2)
    mlp_tree = {f"wi_{layer}": fused[layer] for layer in range(num_layers)}
    mlp_tree["wo"] = down.reshape(2, num_layers // 2, mlp, embed).transpose(0, 2, 1, 3)
    layers = {
        "pre_norm": {"scale": layers_second("attention_norm")},
        "post_norm": {"scale": layers_second("mlp_norm")},
        "query": {"kernel": layers_second("q")},
        "kv": {"kernel": np.stack([layers_second("k"), layers_second("v")], axis=2)},
        "out": {"kernel": layers_second("o")},
        "mlp": mlp_tree,
    }
    params = {
        "params": {
            "token_embedder": {"embedding": param("embedding")},
            "decoder": {
                "decoder_norm": {"scale": param("final_norm")},
                "logits_dense": {"kernel": param("head")},
                "layers": layers,
            },
        }
    }
    directory = tmp_path_factory.mktemp("foreign")
    state = {"params": params, "opt_state": {"count": np.int32(3)}, "step": np.int32(7)}
    with orbax_v0.CheckpointManager(directory / "run", item_names=("items",)) as manager:
        manager.save(7, args=orbax_v0.args.Composite(items=orbax_v0.args.StandardSave(state)))
    (directory / "map.toml").write_text(KEY_MAP)
    return directory


def command(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["jaxpar", "reshard", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_a_key_map_brings_another_trainer_s_checkpoint_in(foreign, llama, tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.toml"
    config.write_text(f'[model]\ninit_from = "hf:{DATA / "hf" / "llama"}"\n')
    arguments = (foreign / "run", tmp_path / "new", "--key-map", foreign / "map.toml", "--config", config)
    assert command(monkeypatch, *arguments, "--mesh", "fsdp=2") == 0
    assert "model.init_from=jaxpar:" in capsys.readouterr().out
    before, after = StepArrays(llama / "0"), StepArrays(tmp_path / "new" / "0")
    assert before.types.keys() == after.types.keys()
    for name, leaf in before.types.items():
        box = [slice(0, size) for size in leaf.shape]
        assert np.array_equal(before.read(name, box), after.read(name, box)), name
    assert command(monkeypatch, tmp_path / "new", tmp_path / "hf", "--to", "hf") == 0
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (DATA / "hf/llama/model.safetensors").read_bytes()


def test_a_key_map_that_does_not_fit_names_the_leaves(foreign, tmp_path, monkeypatch, capsys):
    (tmp_path / "map.toml").write_text(KEY_MAP.replace("query/kernel", "queries/kernel"))
    config = tmp_path / "config.toml"
    config.write_text(f'[model]\ninit_from = "hf:{DATA / "hf" / "llama"}"\n')
    arguments = (foreign / "run", tmp_path / "new", "--key-map", tmp_path / "map.toml", "--config", config)
    assert command(monkeypatch, *arguments) == 1
    error = capsys.readouterr().err
    assert "missing from the checkpoint: items/params/params/decoder/layers/queries/kernel" in error
    assert "unexpected in the checkpoint: items/params/params/decoder/layers/query/kernel" in error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{hf}", "out", "--to", "hf"), "is a Hugging Face directory already"),
        (("{llama}", "out", "--to", "pytorch"), "hf or jaxpar"),
        (("{llama}", "out", "--to", "hf", "--mesh", "fsdp=2"), "leave out --mesh"),
        (("{llama}", "out", "--tokenizer", "somewhere"), "leave out --tokenizer"),
        (("{hf}", "out", "--step", "3"), "leave out --step"),
        (("{foreign}/run", "out", "--key-map", "{foreign}/map.toml"), "needs --config"),
    ],
)
def test_arguments_that_do_nothing_are_refused(llama, foreign, monkeypatch, capsys, arguments, message):
    filled = [a.format(hf=DATA / "hf/llama", llama=llama, foreign=foreign) for a in arguments]
    assert command(monkeypatch, *filled) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_of_an_export_writes_nothing(llama, tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, llama, tmp_path / "out", "--to", "hf", "--dry-run", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dry_run"]
    assert report["tensors"] == len(TensorDirectory(DATA / "hf/llama").types)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError):
        plan_hf_import(str(tmp_path), mesh=None, dtype=None)
