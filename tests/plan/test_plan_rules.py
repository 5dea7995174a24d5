"""Every rule: what it refuses, that the message has the numbers, and that its own remedy works."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from jaxpar.config import Config, ConfigError, load_config
from jaxpar.config.huggingface import read_model_settings
from jaxpar.config.schema import MeshConfig, ModelConfig
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.resolve import check, resolve
from jaxpar.plan.rules import LAYOUT_RULES, RULES, find_problems

HF = Path(__file__).parents[1] / "data" / "hf"
TINY = "model.preset=tiny-bytes"


def problems_of(num_devices, *overrides, num_rows=None, tokenizer_vocab_size=None):
    config = load_config(None, [TINY, *overrides])
    with pytest.raises(ConfigError) as caught:
        resolve(config, num_devices=num_devices, num_rows=num_rows, tokenizer_vocab_size=tokenizer_vocab_size)
    return {problem.key: f"{problem.message} | {problem.remedy}" for problem in caught.value.problems}


def plan_of(num_devices, *overrides, **facts):
    return resolve(load_config(None, [TINY, *overrides]), num_devices=num_devices, **facts)


# ---- mesh (cases C5, C6, C7, C13, C21)


@pytest.mark.parametrize("size", [0, -2, -8])
def test_axis_sizes_that_are_no_size(size):
    assert "at least 1" in problems_of(8, f"mesh.data={size}")["mesh.data"]


def test_two_rest_axes_are_refused():
    assert "2 axes are -1" in problems_of(8, "mesh.data=-1", "mesh.fsdp=-1")["mesh.data, mesh.fsdp"]


def test_rest_axis_takes_what_is_left():
    plan = plan_of(8, "mesh.fsdp=-1", "mesh.tensor=2")
    assert list(plan.mesh) == ["pipeline", "data", "fsdp", "expert", "context", "tensor"]
    assert (plan.mesh["fsdp"], plan.mesh["tensor"], plan.num_devices) == (4, 2, 8)
    assert plan_of(2, "mesh.fsdp=-1", "mesh.tensor=2").mesh["fsdp"] == 1


@pytest.mark.parametrize(("num_devices", "tensor"), [(8, 3), (2, 4), (6, 4)])
def test_rest_axis_that_does_not_divide(num_devices, tensor):
    message = problems_of(num_devices, "mesh.data=-1", f"mesh.tensor={tensor}")["mesh.data"]
    assert f"{num_devices} devices do not divide by {tensor}" in message
    assert f"tensor {tensor}" in message


def test_product_prints_every_factor_and_both_counts():
    message = problems_of(8, "mesh.data=3", "mesh.fsdp=2")["mesh"]
    assert "pipeline 1 x data 3 x fsdp 2 x expert 1 x context 1 x tensor 1 = 6 devices" in message
    assert "there are 8" in message
    assert "2 would stay idle" in message


def test_one_device_and_a_bigger_mesh_tells_how_to_fake_devices():
    message = problems_of(1, "mesh.fsdp=8")["mesh"]
    assert "= 8 devices, but there are 1: 7 too few" in message
    assert "mesh.fsdp=1" in message
    assert "runtime.cpu_devices=8" in message
    assert plan_of(None, "mesh.fsdp=8", "runtime.cpu_devices=8").num_devices == 8


def test_devices_are_counted_over_processes():
    two = ("runtime.cpu_devices=4", "runtime.num_processes=2", "runtime.coordinator=127.0.0.1:9876")
    assert plan_of(None, "mesh.fsdp=-1", *two).mesh["fsdp"] == 8
    assert "runtime.cpu_devices 4 x runtime.num_processes 2" in problems_of(None, "mesh.fsdp=4", *two)["mesh"]


def test_fake_devices_that_did_not_come():
    assert "asks for 8 x 1" in problems_of(1, "runtime.cpu_devices=8", "mesh.fsdp=8")["runtime.cpu_devices"]


def test_device_count_that_is_not_known():
    assert "not known" in problems_of(None, "mesh.fsdp=-1")["mesh.fsdp"]
    assert plan_of(None, "mesh.fsdp=4").num_devices == 4
    assert check(load_config(None, [TINY, "mesh.fsdp=-1"])) == ()


def test_expert_axis_shards_nothing_in_a_dense_model():
    message = problems_of(16, "mesh.expert=4", "mesh.tensor=4")["mesh.expert"]
    assert "axis expert (4) shards nothing" in message


# ---- model against mesh (cases C1, C3, C11, C19)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "allowed"),
    [(16, 2, 4, "{1, 2}"), (16, 8, 16, "{1, 2, 4, 8}"), (16, 2, 3, "{1, 2}")],
)
def test_kv_heads_that_tensor_does_not_divide(heads, kv_heads, tensor, allowed):
    message = problems_of(
        tensor, f"model.num_heads={heads}", f"model.num_kv_heads={kv_heads}", f"mesh.tensor={tensor}"
    )["model.num_kv_heads"]
    assert f"size {kv_heads} does not divide by tensor {tensor}" in message
    assert f"allowed {allowed}" in message
    assert "attention key dim 2" in message


@pytest.mark.parametrize(
    ("tensor", "context", "seq_len", "message"),
    [
        (1, 4, 252, "does not divide by 8 (remainder 4)"),
        (1, 8, 200, "does not divide by 16"),
        (4, 2, 260, "does not divide by 8"),
    ],
)
def test_context_must_divide_the_sequence_into_two_chunks_each(tensor, context, seq_len, message):
    overrides = (f"mesh.tensor={tensor}", f"mesh.context={context}", "model.num_kv_heads=4", "model.num_heads=4")
    assert message in problems_of(tensor * context, *overrides, f"data.seq_len={seq_len}")["data.seq_len"]
    plan_of(tensor * context, *overrides, f"data.seq_len={16 * context * tensor}")


def test_tensor_must_divide_heads_mlp_and_sequence():
    problems = problems_of(3, "mesh.tensor=3")
    assert {"model.num_heads", "model.num_kv_heads", "model.mlp_dim", "data.seq_len"} <= set(problems)
    assert "mlp down dim 1" in problems["model.mlp_dim"]
    assert "255 or 258" in problems["data.seq_len"]


@pytest.mark.parametrize(
    ("vocab", "multiple", "tensor", "works"), [(50257, 1, 2, 2), (50257, 3, 4, 12), (257, 2, 4, 4)]
)
def test_vocabulary_that_tensor_does_not_divide(vocab, multiple, tensor, works):
    overrides = (f"model.vocab_size={vocab}", f"mesh.tensor={tensor}")
    message = problems_of(tensor, f"model.vocab_multiple={multiple}", *overrides)["model.vocab_multiple"]
    assert str(vocab) in message
    assert f"model.vocab_multiple={works}" in message
    assert plan_of(tensor, f"model.vocab_multiple={works}", *overrides).padded_vocab_size % tensor == 0


def test_padding_does_not_depend_on_the_mesh_and_is_reported_both_ways():
    one = plan_of(1, "model.vocab_size=50257")
    two = plan_of(8, "model.vocab_size=50257", "mesh.tensor=4", "mesh.fsdp=2")
    assert one.padded_vocab_size == two.padded_vocab_size == 50304
    assert one.num_params == two.num_params
    assert one.num_padding_params == 2 * 47 * 128


def test_embed_dim_names_params_dim_size_axis_and_axis_size():
    message = problems_of(4, "model.embed_dim=8190", "model.head_dim=64", "mesh.fsdp=4")["model.embed_dim"]
    assert "size 8190 does not divide by fsdp 4 (remainder 2)" in message
    assert "embedding dim 1" in message
    assert "head dim 0" in message
    assert "mlp down dim 2" in message


def test_layers_are_never_floored():
    message = problems_of(16, "model.num_layers=126", "mesh.pipeline=16")["model.num_layers"]
    assert "126 layers do not divide by 16 pipeline stages (remainder 14)" in message


def test_dims_of_the_model_itself():
    assert "remainder 2" in problems_of(1, "model.num_kv_heads=3")["model.num_kv_heads"]
    assert "even" in problems_of(1, "model.head_dim=15")["model.head_dim"]
    scaling = "model.rope_scaling={low_freq_factor=4, high_freq_factor=4}"
    assert "must be above" in problems_of(1, scaling)["model.rope_scaling.high_freq_factor"]
    assert "would do nothing" in problems_of(1, "model.max_positions=64")["model.max_positions"]


def test_sequence_longer_than_learned_positions():
    config = load_config(None, ["model.preset=gpt2-124m", "data.seq_len=2048"])
    with pytest.raises(ConfigError, match=r"model\.max_positions = 1024"):
        check(config)


def test_vocabulary_smaller_than_the_tokenizers():
    text = ("data.source=text", 'data.paths=["x"]')
    assert "257 ids" in problems_of(1, "model.vocab_size=256", *text)["model.vocab_size"]
    assert "1000 ids" in problems_of(1, tokenizer_vocab_size=1000)["model.vocab_size"]
    assert plan_of(1, "model.vocab_size=160").padded_vocab_size == 256  # synthetic rows need no tokenizer


def test_vocabulary_of_the_tokenizer_is_taken(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    dims = ["model.embed_dim=64", "model.num_layers=2", "model.num_heads=4", "model.mlp_dim=128"]
    config = load_config(None, [*dims, f"data.tokenizer={path}"])
    plan = resolve(config, num_devices=1, tokenizer_vocab_size=1000)
    assert (plan.config.model.vocab_size, plan.padded_vocab_size) == (1000, 1024)
    assert check(config) == ()
    with pytest.raises(ConfigError, match="not known here"):
        resolve(config, num_devices=1)


# ---- batch and data (cases B7, B8, C18, C22)


@pytest.mark.parametrize(
    ("batch", "microbatches", "mesh", "expected"),
    [
        (1, 1, "mesh.fsdp=8", "fewer rows than the 8 batch shards (data 1 x fsdp 8 x expert 1)"),
        (10, 1, "mesh.data=4", "do not divide by 4 batch shards"),
        (8, 16, "mesh.data=1", "fewer rows than train.microbatches = 16"),
        (10, 4, "mesh.data=1", "remainder 2"),
        (19, 1, "mesh.data=4", "batch dim 0"),
    ],
)
def test_batches_that_do_not_divide(batch, microbatches, mesh, expected):
    num_devices = int(mesh.partition("=")[2])
    overrides = (f"train.global_batch_size={batch}", f"train.microbatches={microbatches}", mesh)
    message = problems_of(num_devices, *overrides)["train.global_batch_size"]
    assert expected in message
    assert "tokens a step" in message


def test_nearest_batches_work():
    message = problems_of(4, "mesh.data=4", "train.global_batch_size=10", "data.seq_len=100")["train.global_batch_size"]
    assert "8 (800 tokens a step) or 12 (1200 tokens a step)" in message
    plan = plan_of(4, "mesh.data=4", "train.global_batch_size=24", "train.microbatches=3", "data.seq_len=100")
    assert (plan.batch_shards, plan.rows_per_microbatch, plan.rows_per_device) == (4, 8, 2)
    assert plan.tokens_per_step == 2400


def test_data_smaller_than_a_batch():
    drop = ("train.global_batch_size=4", "data.last_batch=drop")
    assert "3 < 4" in problems_of(1, *drop, num_rows=3)["train.global_batch_size"]
    assert "3 < 4" in problems_of(1, *drop, "data.num_samples=3")["train.global_batch_size"]
    assert "100 < 101" in problems_of(1, "train.global_batch_size=101", num_rows=100)["train.global_batch_size"]
    assert plan_of(1, "train.global_batch_size=4", "data.last_batch=pad", num_rows=3).rows_per_device == 4


@pytest.mark.parametrize("last_batch", ["drop", "pad"])
def test_no_rows_at_all_is_always_an_error(last_batch):
    text = ("data.source=text", 'data.paths=["x"]', f"data.last_batch={last_batch}")
    assert "no training row" in problems_of(1, *text, num_rows=0)["data.paths"]


def test_data_source_and_paths():
    assert "needs files" in problems_of(1, "data.source=text")["data.paths"]
    assert "would not read" in problems_of(1, 'data.paths=["a.txt"]')["data.paths"]
    assert "no such file" in problems_of(1, "data.tokenizer=missing.json")["data.tokenizer"]
    assert "nothing is held out" in problems_of(1, "train.eval_every=5")["data.validation_fraction"]


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["data.source=tokens", 'data.paths=["a.bin"]'], "data.eod_id", "needs the id that ends each document"),
        (["data.source=text", 'data.paths=["a"]', "data.eod_id=2"], "data.eod_id", "an end-of-document id of its own"),
        (["data.source=store"], "data.paths", "jaxpar data prepare"),
        (["data.source=sft"], "data.paths", "*.jsonl"),
        (["data.source=store", 'data.paths=["a"]', "data.weights=[1,2]"], "data.weights", "2 weights do not match 1"),
        (["data.source=text", 'data.paths=["a"]', "data.weights=[1]"], "data.weights", "cannot be mixed"),
        (["data.chat_template=chatml"], "data.chat_template", "no conversations"),
    ],
)
def test_settings_of_a_source_belong_to_it(overrides, key, expected):
    assert expected in problems_of(1, *overrides)[key]


def test_the_vocabulary_of_token_ids_is_not_guessed():
    dims = ["model.embed_dim=64", "model.num_layers=2", "model.num_heads=4", "model.mlp_dim=128"]
    stored = load_config(None, [*dims, "data.source=store", 'data.paths=["a"]'])
    assert stored.model.vocab_size == 0
    with pytest.raises(ConfigError, match=r"model.vocab_size = 0: is the tokenizer's"):
        resolve(stored, num_devices=1)
    assert resolve(stored, num_devices=1, tokenizer_vocab_size=5000).config.model.vocab_size == 5000
    assert load_config(None, [*dims, "data.source=sft", 'data.paths=["a"]']).model.vocab_size == 257


# ---- schedule, processes, start


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["train.steps=10", "train.stop_at=11"], "train.stop_at", "train.steps = 10"),
        (["train.steps=10", "optim.warmup_steps=11"], "optim.warmup_steps", "train.steps = 10"),
        (
            ["train.steps=10", "optim.schedule=wsd", "optim.warmup_steps=6", "optim.decay_steps=5"],
            "optim.decay_steps",
            "= 11",
        ),
        (["train.steps=20", "optim.schedule=wsd", "optim.warmup_steps=19"], "optim.decay_steps", "decay 2 steps"),
        (["runtime.process_id=1"], "runtime.process_id", "from 0 to 0"),
        (["runtime.num_processes=2"], "runtime.coordinator", "2 processes need an address"),
        (["runtime.coordinator=localhost"], "runtime.coordinator", "not host:port"),
        (["runtime.coordinator=localhost:0"], "runtime.coordinator", "not host:port"),
        (["runtime.coordinator=localhost:99999"], "runtime.coordinator", "not host:port"),
        (["runtime.coordinator=http://a:80"], "runtime.coordinator", "not host:port"),
        (["checkpoint.resume=missing/dir"], "checkpoint.resume", "no such directory"),
        (["checkpoint.resume=Auto"], "checkpoint.resume", "auto, never, must"),
        (['run.dir=""'], "run.dir", "no directory"),
        (["model.init_from=jaxpar:runs/x"], "model.init_from", "there is no checkpoint"),
        (["model.init_from=weights.bin"], "model.init_from", "not a source"),
        (["run.dir=gs://bucket/run"], "run.dir", "object stores are not supported"),
        (["checkpoint.resume=s3://bucket/run"], "checkpoint.resume", "object stores are not supported"),
        (["model.init_from=hf:missing"], "model.init_from", "no such directory"),
    ],
)
def test_run_rules(overrides, key, expected):
    assert expected in problems_of(None, *overrides)[key]


def test_run_rules_allow_the_edges(tmp_path):
    plan_of(1, "train.steps=10", "train.stop_at=10", "optim.warmup_steps=10")
    plan_of(1, "train.steps=10", "optim.schedule=wsd", "optim.warmup_steps=5", "optim.decay_steps=5")
    plan_of(1, f"checkpoint.resume={tmp_path}")
    for address in ("127.0.0.1:1", "node-7.cluster:65535", "[::1]:9876"):
        plan_of(1, "runtime.num_processes=2", f"runtime.coordinator={address}")


def test_a_config_made_in_python_has_the_shapes_of_its_weights():
    settings = read_model_settings(HF / "llama")
    init_from = {"init_from": f"hf:{HF / 'llama'}"}
    check(Config(model={**settings, **init_from}))
    with pytest.raises(ConfigError) as error:
        check(Config(model={**settings, **init_from, "embed_dim": 128, "num_layers": 7}))
    found = {problem.key: problem.message for problem in error.value.problems}
    assert found.keys() == {"model.embed_dim", "model.num_layers"}
    assert found["model.num_layers"].endswith(f"has {settings['num_layers']}")


def test_pretrained_directory_needs_weights(tmp_path):
    shutil.copy(HF / "llama" / "config.json", tmp_path)
    config = load_config(None, [f"model.init_from=hf:{tmp_path}"])
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        check(config)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve(config, num_devices=1).config.model.vocab_size == 160


# ---- optimizers


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["optim.name=lion", "optim.eps=1e-6"], "optim.eps", "optim.name from adamw, adafactor, muon"),
        (["optim.momentum=0.9"], "optim.momentum", 'optim.name = "adamw" (those are b1, b2, eps)'),
        (
            ["optim.name=sgd", "optim.ns_steps=3"],
            "optim.ns_steps",
            "remove optim.ns_steps, or choose optim.name from muon",
        ),
        (["optim.name=adafactor", "optim.b2=0.9"], "optim.b2", "factored"),
        (["train.eval_params=ema"], "train.eval_params", "optim.ema_decay is 0"),
        (["optim.name=muon", "optim.adamw_lr=1e-3", "optim.lr=0.0"], "optim.adamw_lr", "multiple of optim.lr"),
    ],
)
def test_settings_of_other_optimizers_are_refused(overrides, key, expected):
    assert expected in problems_of(1, *overrides)[key]


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon", "sgd"])
def test_every_optimizer_plans_with_its_own_settings_only(name):
    own = {
        "adamw": "eps=1e-6",
        "lion": "b2=0.98",
        "adafactor": "factored=false",
        "muon": "ns_steps=3",
        "sgd": "nesterov=true",
    }
    assert plan_of(1, f"optim.name={name}", f"optim.{own[name]}").config.optim.name == name


# ---- recomputation


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["train.remat=offload", "runtime.cpu_devices=2", "mesh.fsdp=2"], "train.remat", "host memory"),
        (["train.remat_save=['up','up']", "mesh.fsdp=2"], "train.remat_save", "more than once"),
        (
            ["model.family=gpt2", "model.max_positions=512", "train.remat_save=['gate']", "mesh.fsdp=2"],
            "train.remat_save",
            "gpt2 has none",
        ),
    ],
)
def test_recomputation_that_cannot_be(overrides, key, said):
    assert said in problems_of(2, *overrides)[key]


def test_a_list_that_nothing_reads_is_warned_about():
    for remat, count in (("full", 1), ("selective", 0)):
        plan = plan_of(2, "mesh.fsdp=2", f"train.remat={remat}", "train.remat_save=['up']")
        assert sum("remat_save" in warning for warning in plan.warnings) == count


# ---- not yet


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["mesh.pipeline=2", "mesh.context=2", "mesh.fsdp_strategy=grads"], "mesh.fsdp_strategy"),
        (["mesh.pipeline=2", "mesh.expert=2", "mesh.fsdp_strategy=optimizer"], "mesh.fsdp_strategy"),
        (
            ["mesh.pipeline=2", "mesh.fsdp=2", "model.num_experts=4", "model.top_k=2", "model.first_dense_layers=1"],
            "model.first_dense_layers",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_name(overrides, key):
    assert "not yet" in problems_of(4, *overrides, "train.microbatches=2")[key]


def test_a_profile_is_of_steps_that_are_trained():
    message = problems_of(2, "mesh.data=2", "train.steps=20", "observe.profile_start=21")["observe.profile_start"]
    assert "comes after the last step, train.steps = 20" in message
    plan_of(2, "mesh.data=2", "train.steps=20", "observe.profile_start=20")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mesh.fsdp=4", "pipeline.gather=per_step"], "there is one stage"),
        (["mesh.pipeline=2", "mesh.data=2", "pipeline.gather=per_step"], "nothing is gathered"),
        (
            ["mesh.pipeline=2", "mesh.fsdp=2", "mesh.fsdp_strategy=grads", "pipeline.gather=per_microbatch"],
            "mesh.fsdp_strategy = 'grads' gathers weights once per step",
        ),
        (["mesh.pipeline=2", "mesh.context=2", "pipeline.gather=per_step"], "not yet"),
    ],
)
def test_how_often_stages_gather_is_asked_where_they_do(overrides, said):
    assert said in problems_of(4, *overrides, "train.microbatches=2")["pipeline.gather"]


def test_ways_to_gather_that_go_together():
    for settings in (["pipeline.gather=per_step"], ["mesh.fsdp_strategy=grads", "pipeline.gather=per_step"]):
        plan_of(4, "mesh.pipeline=2", "mesh.fsdp=2", "train.microbatches=2", *settings)


@pytest.mark.parametrize("strategy", ["grads", "optimizer"])
def test_strategy_needs_an_axis(strategy):
    assert "shard nothing" in problems_of(2, "mesh.data=2", f"mesh.fsdp_strategy={strategy}")["mesh.fsdp_strategy"]
    assert plan_of(2, "mesh.fsdp=2", f"mesh.fsdp_strategy={strategy}").mesh["fsdp"] == 2


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_mixtures_of_experts_train_alone_and_in_a_pipeline(preset):
    check(load_config(None, [f"model.preset={preset}", "mesh.expert=8"]), num_devices=8)
    staged = ["mesh.pipeline=2", "mesh.expert=4", "train.microbatches=2"]
    check(load_config(None, [f"model.preset={preset}", *staged]), num_devices=8)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.top_k=2"], "model.top_k"),
        (["model.num_experts=4"], "model.top_k"),
        (["model.num_experts=4", "model.top_k=5"], "model.top_k"),
        (["model.num_experts=4", "model.top_k=1", "model.first_dense_layers=6"], "model.first_dense_layers"),
        (["model.num_experts=6", "model.top_k=1", "mesh.expert=4"], "model.num_experts"),
        (["mesh.expert=4"], "mesh.expert"),
        (["model.balance_coef=0.1"], "model.balance_coef"),
        (["model.family=mixtral"], "model.num_experts"),
        (["model.family=gemma", "model.num_experts=4", "model.top_k=1"], "model.num_experts"),
        (["model.num_experts=8", "model.top_k=2", "model.top_k_groups=2"], "model.top_k_groups"),
        (["model.num_experts=8", "model.top_k=2", "model.num_expert_groups=3"], "model.num_expert_groups"),
        (
            ["model.num_experts=8", "model.top_k=3", "model.num_expert_groups=4", "model.top_k_groups=1"],
            "model.top_k_groups",
        ),
        (["pipeline.chunks=2"], "pipeline.chunks"),
        (['pipeline.schedule="interleaved"', "mesh.pipeline=2", "train.microbatches=4"], "pipeline.chunks"),
        (["mesh.pipeline=2", "train.microbatches=1"], "train.microbatches"),
    ],
)
def test_rules_of_axes_that_are_planned(overrides, key):
    config = load_config(None, [TINY, "mesh.fsdp=-1", "train.global_batch_size=64", *overrides])
    found = find_problems(gather_facts(config, num_devices=8), LAYOUT_RULES)
    assert key in {problem.key for problem in found}


def test_layout_rules_are_rules_of_every_run():
    assert set(LAYOUT_RULES) < set(RULES)


def test_config_made_in_python_says_who_applies_presets():
    with pytest.raises(ConfigError, match=r"presets are applied by jaxpar\.load_config"):
        check(Config(model=ModelConfig(preset="tiny-bytes")))


# ---- all together


def test_all_problems_come_at_once():
    problems = problems_of(
        8,
        "mesh.tensor=3",
        "mesh.data=0",
        "train.stop_at=500",
        "optim.eps=1e-6",
        "optim.name=lion",
        "runtime.process_id=4",
    )
    assert {"mesh.data", "model.num_heads", "train.stop_at", "optim.eps", "runtime.process_id"} <= set(problems)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["precision.params=bfloat16"], "precision.params"),
        (["optim.decay_steps=5"], "optim.decay_steps"),
        (["train.eval_batches=5"], "train.eval_batches"),
        (["data.validation_fraction=0.5"], "data.validation_fraction"),
        (["runtime.coordinator=a:1"], "runtime.coordinator"),
        (["checkpoint.every=0", "checkpoint.final=false"], "no checkpoint"),
    ],
)
def test_warnings(overrides, expected):
    (warning,) = plan_of(1, *overrides).warnings
    assert expected in warning


def test_a_plain_config_has_no_warnings():
    assert plan_of(1).warnings == ()


def test_rules_are_documented():
    assert all(rule.__doc__ for rule in RULES)
    assert len(set(RULES)) == len(RULES)


def test_plan_is_frozen_and_keeps_the_mesh_as_written():
    plan = plan_of(8, "mesh.fsdp=-1")
    assert plan.config.mesh == MeshConfig(fsdp=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_devices = 3


def test_a_plan_is_not_told_of_fake_devices(capsys):
    """They train; a plan has as many devices as one likes."""
    for mesh in (["mesh.fsdp=128"], ["mesh.data=3", "mesh.fsdp=-1"]):
        config = load_config(None, [TINY, *mesh])
        facts = dataclasses.replace(gather_facts(config, num_devices=64), is_planned=True)
        (remedy,) = (problem.remedy for problem in find_problems(facts) if problem.key.startswith("mesh"))
        assert "fake" not in remedy
        assert f"or plan for --devices {3 if len(mesh) == 2 else 128}" in remedy
