"""A resolved plan as programs: mesh, model, abstract state, and the compiled steps. Nothing is allocated."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxpar.compiler_options import CompilerOptions, choose_options
from jaxpar.config.errors import ConfigError
from jaxpar.config.schema import Config, ModelConfig
from jaxpar.loss import next_token_loss
from jaxpar.mesh import make_mesh
from jaxpar.model.decoder import Decoder, Numerics
from jaxpar.model.dispatch import Exchange
from jaxpar.model.remat import KEEP_NAMED, Remat
from jaxpar.optim import make_optimizer
from jaxpar.plan.accelerator import Accelerator, KernelChoice
from jaxpar.plan.attention import choose_attention
from jaxpar.plan.compiler_options import Option
from jaxpar.plan.evaluation import GatherChoice, gather_on
from jaxpar.plan.experts import choose_grouped_product, describe_exchange
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.flops import training_flops_per_token
from jaxpar.plan.remat_rules import offload_objection
from jaxpar.plan.resolve import ResolvedPlan
from jaxpar.sharding import EXPERT_AXIS, PIPELINE_AXIS, SEQUENCE_AXIS, batch_sharding
from jaxpar.stages import StagedDecoder
from jaxpar.state import ModelDefinition, TrainState, abstract_state, fresh_state, make_init
from jaxpar.step import Accumulate, Evaluate, LossFn, accumulate, evaluate, make_eval_step, make_train_step
from jaxpar.strategy import FsdpStrategy

BATCH_DTYPES = {
    "tokens": jnp.int32,
    "labels": jnp.int32,
    "positions": jnp.int32,
    "segment_ids": jnp.int32,
    "weights": jnp.float32,
}
"""Arrays of a batch, each [microbatches, rows, sequence]."""


def decoder_definition(model: ModelConfig, numerics: Numerics, *, layer_multiple: int = 1) -> ModelDefinition:
    """The decoder of a model config, its dimensions complete."""
    return ModelDefinition(lambda rngs: Decoder(model, numerics, rngs), layer_multiple=layer_multiple)


def accelerator_of(device: jax.Device) -> Accelerator:
    """What the choice of an attention kernel needs to know of a device."""
    capability = getattr(device, "compute_capability", None)
    return Accelerator(
        name=device.device_kind,
        capability=tuple(int(part) for part in capability.split(".")) if capability else None,
        has_tokamax=importlib.util.find_spec("tokamax") is not None,
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything between a plan and a running step."""

    plan: ResolvedPlan
    mesh: Mesh
    definition: ModelDefinition
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    attention: KernelChoice | None
    """None for a model that is not ours."""
    grouped: KernelChoice | None
    """What multiplies the rows of the experts; None without experts."""
    gather: GatherChoice | None
    """How often stages gather their weights, and so the strategy; None for a model that is not ours."""
    options: CompilerOptions

    @classmethod
    def build(cls, plan: ResolvedPlan, devices: Sequence[jax.Device] | None = None) -> Program:
        """The program of a plan on ``devices`` (default: all).

        Raises:
            ConfigError: the attention kernel, or the recomputation, that the config asks for is not possible on these
                devices, or the compiler does not know an option.
        """
        config = plan.config
        mesh = make_mesh(plan.mesh, devices)
        if problems := list(offload_objection(config.train.remat, mesh.devices.flat[0].platform)):
            raise ConfigError(problems)
        accelerator = accelerator_of(mesh.devices.flat[0])
        attention = choose_attention(config, plan.mesh["context"], accelerator)
        grouped = choose_grouped_product(config, plan.mesh[SEQUENCE_AXIS], accelerator)
        exchange = Exchange(
            mode=config.mesh.expert_exchange,
            receive_factor=config.mesh.expert_receive_factor,
            platform=mesh.devices.flat[0].platform,
            product=grouped.kernel,
        )
        # A stage does its forward pass again before it goes back. A block that did so too would do it a third time.
        remat = KEEP_NAMED if plan.mesh[PIPELINE_AXIS] > 1 else Remat.of(config.train)
        numerics = Numerics.of(
            config.precision,
            remat=remat,
            context_mode=config.mesh.context_mode,
            exchange=exchange,
            attention=attention.kernel,
            dropout=config.train.dropout,
        )
        definition = decoder_definition(config.model, numerics, layer_multiple=plan.mesh[PIPELINE_AXIS])
        return cls(
            plan=plan,
            mesh=mesh,
            attention=attention,
            grouped=grouped if config.model.num_experts else None,
            gather=gather_on(gather_facts(config, num_devices=plan.num_devices), mesh.devices.flat[0].device_kind),
            options=choose_options(config, mesh),
            definition=definition,
            optimizer=make_optimizer(
                config.optim,
                definition.logical_axes,
                vocab_size=config.model.vocab_size,
                compute=config.precision.compute,
            ),
            loss_fn=partial(next_token_loss, z_loss=config.train.z_loss, chunk_tokens=config.train.loss_chunk_tokens),
        )

    def with_options(self, values: Mapping[str, Option]) -> Program:
        """The same program compiled with these options alone."""
        return dataclasses.replace(self, options=CompilerOptions(values=values, notes=()))

    @property
    def config(self) -> Config:
        """The plan's config."""
        return self.plan.config

    @property
    def true_vocab_size(self) -> int | None:
        """Size of ``vocab`` dims on disk; None if nothing is padded in memory."""
        return self.config.model.vocab_size

    @property
    def flops_per_token(self) -> int:
        """Of a training step, by convention A; 0 if it is not known."""
        return training_flops_per_token(self.config.model, self.config.data.seq_len)

    @property
    def eval_last_batch(self) -> str:
        """What validation does with rows that do not fill a batch, as ``data.last_batch``."""
        return "pad"

    @property
    def batch_words(self) -> str:
        """For people: what a step is trained on."""
        rows = f"{self.config.train.global_batch_size} rows x {self.config.data.seq_len}"
        return f"{self.plan.tokens_per_step:,} tokens a step = {rows}"

    @property
    def notes(self) -> list[str]:
        """For the log: what was chosen for this mesh, and how its speed is counted."""
        model, expert = self.config.model, self.plan.mesh[EXPERT_AXIS]
        exchange = self.config.mesh.expert_exchange
        experts = []
        if self.grouped:
            experts = [describe_exchange(exchange, model.top_k, model.num_experts, expert), self.grouped.reason]
        convention = "FLOPs by convention A: 6 (P - V D) + 6 L S H h per token, causal attention counted once"
        gather = [self.gather.reason] if self.gather.reason else []
        return [*self.options.notes, self.attention.reason, *experts, *gather, convention]

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every array of a batch."""
        return next(iter(self.abstract_batch.values())).sharding

    @property
    def averages(self) -> bool:
        """Whether the state has a moving average of the parameters."""
        return self.config.optim.ema_decay > 0

    def eval_params(self, state: TrainState) -> dict:
        """The parameters that are validated, see ``train.eval_params``."""
        return state.ema if self.config.train.eval_params == "ema" else state.params

    @property
    def strategy(self) -> FsdpStrategy:
        """When weights are gathered and gradients scattered."""
        name = self.gather.strategy
        return FsdpStrategy.of("full" if name == "none" else name, self.config.precision)

    @cached_property
    def accumulate(self) -> Accumulate:
        """Gradients and means of a batch; through the stages of a pipeline, if the mesh has one."""
        if self._staged:
            return self._staged.accumulate
        return partial(accumulate, self.definition, self.loss_fn, strategy=self.strategy)

    @cached_property
    def evaluate(self) -> Evaluate:
        """Sums of a validation batch, likewise."""
        return self._staged.evaluate if self._staged else partial(evaluate, self.definition, self.loss_fn)

    @cached_property
    def _staged(self) -> StagedDecoder | None:
        num_stages = self.mesh.shape[PIPELINE_AXIS]
        return StagedDecoder.of(self.config, self.definition, num_stages, self.strategy) if num_stages > 1 else None

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the training state."""
        return abstract_state(self.definition, self.optimizer, self.mesh, averages=self.averages)

    @cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of one global batch."""
        train = self.config.train
        shape = (train.microbatches, self.plan.rows_per_microbatch, self.config.data.seq_len)
        sharding = batch_sharding(self.mesh)
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in BATCH_DTYPES.items()}

    def init(self, seed: int) -> TrainState:
        """A fresh state, created sharded: no leaf is ever whole on a device."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        # XLA:CPU would spend 12 s instead of 3 on making the random bits of a tiny model fast (jaxlib 0.12.0.1).
        options = {"xla_backend_optimization_level": 1} if on_cpu else None
        with jax.set_mesh(self.mesh):
            make = make_init(self.definition, self.optimizer, self.mesh, averages=self.averages)
            return jax.jit(make, out_shardings=shardings, compiler_options=options)(jax.random.key(seed))

    def start_from(self, params: dict) -> TrainState:
        """A state at step 0 with given parameters, already sharded as ``abstract_state.params``."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        with jax.set_mesh(self.mesh):
            fresh = partial(fresh_state, optimizer=self.optimizer, averages=self.averages)
            return jax.jit(fresh, out_shardings=shardings, donate_argnums=0)(params)

    def lower_train_step(self) -> jax.stages.Lowered:
        """The training step, traced: (state, batch) -> (state, metrics), with the state donated."""
        step = make_train_step(self.config, self.optimizer, self.accumulate)
        return self._lower(step, self.abstract_state, self.abstract_batch, donate=(0,))

    def lower_eval_step(self) -> jax.stages.Lowered:
        """The validation step, traced: (params, batch) -> sums."""
        step = make_eval_step(self.config, self.evaluate)
        return self._lower(step, self.eval_params(self.abstract_state), self.abstract_batch)

    def _lower(self, function, *abstract_args, donate: tuple[int, ...] = ()) -> jax.stages.Lowered:
        """Compiled ahead of time: one executable, which refuses arrays of another layout instead of recompiling.

        Results need no ``out_shardings``: in Explicit mode their types say where they lie.
        """
        options = dict(self.options.values) or None
        with jax.set_mesh(self.mesh):
            return jax.jit(function, donate_argnums=donate, compiler_options=options).lower(*abstract_args)
