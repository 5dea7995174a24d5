"""The rule table: everything that is checked about a config before any device is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxpar.config.errors import Problem
from jaxpar.plan import (
    data_rules,
    mesh_rules,
    model_rules,
    optim_rules,
    own_rules,
    remat_rules,
    run_rules,
    support_rules,
)
from jaxpar.plan.facts import Facts
from jaxpar.plan.layout import DEFAULT_SAVE
from jaxpar.plan.pipeline_warnings import pipeline_warnings

Rule = Callable[[Facts], Iterator[Problem]]
"""Yields what is wrong; nothing if the rule holds, or needs a fact that is not known yet."""

MESH_RULES: tuple[Rule, ...] = (
    mesh_rules.axis_sizes,
    mesh_rules.one_rest_axis,
    mesh_rules.rest_axis_divides,
    mesh_rules.mesh_product,
)
"""What makes a mesh one of the devices that are there."""

MODEL_RULES: tuple[Rule, ...] = (
    model_rules.dims_complete,
    model_rules.kv_heads_divide_heads,
    model_rules.head_dim_even,
    model_rules.rope_scaling_order,
    model_rules.positions_fit,
    model_rules.experts_consistent,
)
"""What makes a model whole, whatever the mesh: the rules of a search, and of inference."""

_SHARDING_RULES: tuple[Rule, ...] = (
    model_rules.layers_divide_stages,
    model_rules.chunks_need_interleaving,
    model_rules.microbatches_fill_stages,
    model_rules.stages_repeat_their_forward_pass,
    model_rules.param_dims_divide,
    model_rules.sequence_divides,
)
"""What makes a model fit a mesh."""

LAYOUT_RULES: tuple[Rule, ...] = (
    *MESH_RULES,
    mesh_rules.axis_shards_something,
    mesh_rules.strategy_shards_something,
    mesh_rules.stages_gather_something,
    *MODEL_RULES,
    *_SHARDING_RULES,
    run_rules.batch_divides,
)
"""What makes a layout legal, whether or not the trainer can do it yet: the rules of ``jaxpar plan``."""

_OPTIMIZER_RULES: tuple[Rule, ...] = (
    optim_rules.settings_are_used,
    optim_rules.adamw_lr_has_a_ratio,
    optim_rules.average_exists,
)

_RUN_RULES: tuple[Rule, ...] = (
    run_rules.processes_find_each_other,
    run_rules.paths_are_on_file_systems,
    run_rules.run_directory_usable,
    run_rules.resume_exists,
    run_rules.best_checkpoints_have_a_metric,
)
"""Processes, files and checkpoints of any run."""

RULES: tuple[Rule, ...] = (
    *MESH_RULES,
    mesh_rules.device_count_agrees,
    mesh_rules.axis_shards_something,
    mesh_rules.strategy_shards_something,
    mesh_rules.stages_gather_something,
    support_rules.dense_blocks_in_a_pipeline,
    support_rules.strategy_over_other_axes,
    *MODEL_RULES,
    model_rules.vocabulary_holds_tokenizer,
    *_SHARDING_RULES,
    remat_rules.saved_activations_exist,
    remat_rules.offload_needs_a_host,
    run_rules.batch_divides,
    run_rules.rows_fill_a_batch,
    run_rules.data_paths_match_source,
    data_rules.end_of_document_known,
    data_rules.weights_match_paths,
    data_rules.chat_template_is_used,
    run_rules.tokenizer_exists,
    run_rules.validation_has_data,
    run_rules.steps_in_order,
    run_rules.profile_is_reached,
    *_OPTIMIZER_RULES,
    *_RUN_RULES,
    run_rules.init_from_exists,
    run_rules.init_from_fits,
)
"""Every rule of a run, in the order in which its problems are printed."""

OWN_RULES: tuple[Rule, ...] = (
    *MESH_RULES,
    mesh_rules.device_count_agrees,
    own_rules.own_axes,
    own_rules.own_settings,
    run_rules.batch_divides,
    run_rules.rows_fill_a_batch,
    run_rules.steps_in_order,
    *_OPTIMIZER_RULES,
    *_RUN_RULES,
)
"""The rules of a run with a user's own module and data."""


def find_problems(facts: Facts, rules: tuple[Rule, ...] = RULES) -> list[Problem]:
    """Everything that is wrong, as far as the facts tell."""
    return [problem for rule in rules for problem in rule(facts)]


def find_warnings(facts: Facts) -> list[str]:
    """What is allowed and probably not meant: each names the key and what it leads to."""
    config = facts.config
    data, train, optim, runtime = config.data, config.train, config.optim, config.runtime
    cases = (
        (
            config.precision.params == "bfloat16",
            "precision.params = 'bfloat16' keeps master weights and moments in bfloat16: an update below 1/256 of a "
            "weight is rounded away, so norm scales can stay at exactly 1.0; float32 (the default) has no such floor",
        ),
        (
            optim.decay_steps > 0 and optim.schedule != "wsd",
            f"optim.decay_steps = {optim.decay_steps} does nothing: optim.schedule is {optim.schedule!r}, not 'wsd'",
        ),
        (
            train.remat not in ("selective", "offload") and train.remat_save != DEFAULT_SAVE,
            f"train.remat_save does nothing: train.remat is {train.remat!r}, neither 'selective' nor 'offload'",
        ),
        (
            train.eval_batches > 0 and train.eval_every == 0,
            f"train.eval_batches = {train.eval_batches} does nothing: train.eval_every is 0",
        ),
        (
            data.validation_fraction > 0 and train.eval_every == 0,
            f"data.validation_fraction = {data.validation_fraction} holds data out that nothing uses: "
            "train.eval_every is 0",
        ),
        (
            config.model.num_experts > config.model.top_k
            and config.model.router == "softmax"
            and not config.model.balance_coef
            and not config.model.init_from,
            "model.balance_coef = 0 leaves nothing to keep the load of the experts even: a router that is trained from "
            'random weights can come to use few of them; 0.01 is common, or model.router="sigmoid"',
        ),
        (
            config.model.balance_rate != 0.001 and config.model.router != "sigmoid",
            f"model.balance_rate = {config.model.balance_rate} does nothing: model.router is {config.model.router!r}",
        ),
        (
            runtime.coordinator is not None and runtime.num_processes == 1,
            f"runtime.coordinator = {runtime.coordinator!r} does nothing: runtime.num_processes is 1",
        ),
        (
            not (config.checkpoint.every or config.checkpoint.every_minutes or config.checkpoint.final),
            "checkpoint.every = 0 with checkpoint.final = false: this run writes no checkpoint at all",
        ),
    )
    return [text for applies, text in cases if applies] + list(pipeline_warnings(facts))
