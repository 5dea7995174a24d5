"""What a config may ask of a pipeline: refused by name, or allowed with its exact cost."""

import pytest

from jaxpar.config import ConfigError, load_config
from jaxpar.plan.resolve import resolve

MODEL = ("model.vocab_size=256", "model.embed_dim=32", "model.num_heads=4", "model.mlp_dim=64", "data.seq_len=16")


def plan_of(stages: int, num_layers: int, microbatches: int, *overrides: str):
    config = load_config(
        None,
        [
            *MODEL,
            f"mesh.pipeline={stages}",
            f"model.num_layers={num_layers}",
            f"train.microbatches={microbatches}",
            f"train.global_batch_size={microbatches}",
            *overrides,
        ],
    )
    return resolve(config, num_devices=stages)


def problems_of(*arguments) -> dict[str, str]:
    with pytest.raises(ConfigError) as raised:
        plan_of(*arguments)
    return {problem.key: str(problem) for problem in raised.value.problems}


@pytest.mark.parametrize(("layers", "places", "empty"), [(126, 8, "1.6%"), (61, 4, "4.7%")])
def test_layers_that_16_stages_do_not_divide_need_to_be_asked_for(layers, places, empty):
    message = problems_of(16, layers, 64)["model.num_layers"]
    assert f"(remainder {layers % 16})" in message
    assert 'pipeline.layers_per_stage="balanced"' in message
    (warning,) = plan_of(16, layers, 160, "pipeline.layers_per_stage=balanced").warnings
    assert f"has {places} of {layers} layers" in warning
    assert empty in warning


@pytest.mark.parametrize("given", ["[4, 5]", "[4, 4, 2]", "[1, 1, 1, 1]"])
def test_a_list_of_layers_must_fit(given):
    assert "pipeline.layers_per_stage" in problems_of(4, 10, 16, f"pipeline.layers_per_stage={given}")
    plan_of(4, 10, 40, "pipeline.layers_per_stage=[4, 4, 1, 1]")


def test_a_list_of_layers_without_stages_is_refused():
    assert "one stage" in problems_of(1, 4, 1, "pipeline.layers_per_stage=[4]")["pipeline.layers_per_stage"]
    plan_of(1, 4, 1, "pipeline.layers_per_stage=balanced")


def test_fewer_microbatches_than_stages_run_under_gpipe_only():
    for schedule in ("1f1b", "interleaved", "breadth_first"):
        chunks = 1 if schedule == "1f1b" else 2
        message = problems_of(4, 8, 2, f"pipeline.schedule={schedule}", f"pipeline.chunks={chunks}")[
            "train.microbatches"
        ]
        assert "at least one microbatch per stage" in message
        assert "gpipe" in message
    (warning,) = plan_of(4, 8, 2, "pipeline.schedule=gpipe").warnings
    assert "idle 60.0% of a step" in warning
    assert "from 28 on" in warning


def test_few_microbatches_are_warned_about_with_the_number_that_is_enough():
    (warning,) = plan_of(4, 8, 8).warnings
    assert "idle 27.3%" in warning
    assert not plan_of(4, 8, 28).warnings
    assert len(plan_of(4, 8, 18, "pipeline.schedule=interleaved", "pipeline.chunks=2").warnings) == 1


def test_keeping_activations_in_a_stage_is_refused():
    message = problems_of(2, 4, 8, "train.remat=none")["train.remat"]
    assert 'train.remat="full"' in message


def test_batches_that_microbatches_do_not_divide_are_refused():
    assert "train.global_batch_size" in problems_of(2, 4, 8, "train.global_batch_size=12")
