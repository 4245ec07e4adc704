"""Megatron's forward-backward function as a training loop calls it: arguments in, losses out, gradients finalized."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.runtime import platform
from megatron.runtime.communication.message_channel import MessageChannel
from megatron.runtime.drop_in import modules_on_ranks
from megatron.runtime.drop_in.balanced_data import Length, deal_microbatches
from megatron.runtime.drop_in.modules_on_ranks import LANGUAGE, DataIterator, LoopInputs, LoopModules
from megatron.runtime.drop_in.pipeline_schedule import UNIT, LoopModule, PipelineShape, build_pipeline_schedule
from megatron.runtime.drop_in.pipeline_step import PARITIES, SHAPE_TRACKS, PipelineStep
from megatron.runtime.drop_in.unit_groups import UnitGroups
from multimodal.plan.communicators import Partners, Track, message_partners
from multimodal.values.errors import ConfigError
from multimodal.values.schedule import Schedule

MESSAGE_TIMEOUT = timedelta(minutes=10)
"""Time after which a stage gives up waiting for another."""
_TRACKS = tuple(Track(direction, parity) for direction in ("backward", "forward") for parity in PARITIES)
"""Tracks of messages; the loop's model may have any number of stages."""


class ForwardBackward:
    """Megatron's three forward-backward functions in one, with a Braid schedule; all ranks make its groups in the first step."""

    def __init__(self, *, schedule: str, length: Length | None = None, groups: UnitGroups | None = None) -> None:
        """length: balances microbatches over replicas, if given; groups: of the plan, which modules on own ranks must follow."""
        self._schedule, self._length = schedule, length
        self._units, self._unlike, self._collections = (
            ({}, None, {}) if groups is None else (groups.units, groups.unlike, groups.collections)
        )
        self._world: dist.ProcessGroup | None = None
        self._channel: MessageChannel | None = None
        self._tracks: tuple[Track, ...] = ()
        self._connected: set[tuple[LoopModule, ...]] = set()

    def forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: DataIterator | list[DataIterator] | Mapping[str, DataIterator | list[DataIterator]],
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run a step: all forwards and, unless `forward_only`, all backwards and the finalizing of gradients.

        Arguments and result are those of megatron-core's functions of this kind (`schedules.get_forward_backward_func`). A
        `p2p_communicator` only says who is in the pipeline, or in which module; messages go through Braid's own channel. Raises
        ConfigError if an option would be ignored, before any message is sent.
        """
        chunks = model if isinstance(model, list) else [model]
        llm = [LANGUAGE, *self._units][-1]
        of_modules: dict[str, Any] = dict(data_iterator) if isinstance(data_iterator, Mapping) else {}
        given = of_modules.pop(llm, None) if isinstance(data_iterator, Mapping) else data_iterator
        iterators = given if isinstance(given, list) else [given]
        if any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in chunks):
            raise ConfigError(
                "use_megatron_fsdp=True cannot be used with Braid's schedules: it gathers and releases weights in the order of "
                "Megatron's own; leave it out (--use-distributed-optimizer shards the optimizer), or call patches.undo()"
            )
        config = get_model_config(chunks[0])
        inputs = LoopInputs(forward_step_func, chunks, iterators, config, collect_non_loss_data, first_val_step)
        modules, groups, inputs = self._modules_of(inputs, llm, p2p_communicator, pg_collection)
        is_whole = [each.name for each in modules] == [UNIT]
        shape = PipelineShape(modules, num_microbatches, forward_only)
        if len(iterators) != len(chunks):
            found, wanted = len(iterators), len(chunks)
            raise ConfigError(f"{found} data iterators were given for {wanted} model chunks; give a list with one per chunk")
        if adjust_tensor_shapes_fn is not None and (groups.pp.size() == 1 or len(chunks) > 1 or not is_whole):
            raise ConfigError("adjust_tensor_shapes_fn works with several pipeline stages of one model chunk each; leave it out")
        check_options(config, shape=shape, num_chunks=len(chunks), is_llm=shape.llm.is_here)
        schedule = build_pipeline_schedule(self._schedule, shape=shape)
        message_shapes = _message_shapes(
            adjust_tensor_shapes_fn,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        if self._length is not None:
            if of_modules:
                raise ConfigError("patches.apply(balance=...) needs one data iterator for all modules of a rank; leave it out")
            if self._unlike is not None:
                raise ConfigError("patches.apply(balance=...) needs replicas that are alike; leave it out, or apply another plan")
            group = getattr(groups, "dp", None) or parallel_state.get_data_parallel_group()
            deal = partial(deal_microbatches, count=num_microbatches, length=self._length, group=group)
            inputs = replace(inputs, data_iterators=[deal(each) for each in iterators])
        if inputs.takes_roles:
            inputs = modules_on_ranks.divide_data(inputs, modules, of_modules)
        has_channel = shape.has_messages or self._unlike is not None  # of which another may have messages
        channel = self._open_channel(schedule, modules, config.variable_seq_lengths) if has_channel else None
        step = PipelineStep(inputs, channel=channel, message_shapes=message_shapes, shape=shape, schedule=schedule)
        is_last_rank = groups.pp.rank() == groups.pp.size() - 1 and shape.llm.is_here
        told = groups if is_whole or pg_collection is None else pg_collection
        _run_step(step, tp_group=groups.tp, told=told, is_last_rank=is_last_rank, force_all_reduce=force_all_reduce)
        if self._unlike is not None and not forward_only:
            self._unlike.reduce(chunks, step.num_tokens if config.calculate_per_token_loss else num_microbatches)
        return step.forward_data

    def _modules_of(self, inputs: LoopInputs, llm: str, communicator: Any, collection: Any) -> LoopModules:
        """Return what the model runs as: one module, or those that the communicator or the applied plan says."""
        if getattr(communicator, "module_to_grid_map", None) is not None:
            return modules_on_ranks.read_modules(communicator, collection, inputs, self._units)
        if modules := modules_on_ranks.modules_of_plan(self._units, inputs.chunks[0]):
            own = {LANGUAGE if name == llm else name: each for name, each in self._collections.items()}
            return modules_on_ranks.run_as_modules(inputs, modules, own)
        groups = _process_groups(communicator, collection)
        stages = tuple((rank,) for rank in dist.get_process_group_ranks(groups.pp))
        inputs = replace(inputs, context_parallel_size=groups.cp.size())
        return (LoopModule(UNIT, (stages,), len(inputs.chunks)),), groups, inputs

    def _open_channel(self, schedule: Schedule, modules: tuple[LoopModule, ...], tells_shapes: bool) -> MessageChannel:
        """Return this process's channel; a new one for other tracks, or where torch.distributed was set up anew."""
        tracks = _TRACKS + SHAPE_TRACKS * tells_shapes
        if self._channel is None or self._world is not dist.group.WORLD or self._tracks != tracks:
            self._world, self._tracks = dist.group.WORLD, tracks
            self._channel = MessageChannel(tracks=tracks, timeout=MESSAGE_TIMEOUT)
            self._connected.clear()
        if modules not in self._connected:
            self._connected.add(modules)
            found = message_partners(schedule.shape.graph, schedule.shape.plan, rank=dist.get_rank())
            nobody = Partners(frozenset(), frozenset())
            ways = {track: track._replace(direction=track.direction.replace("shape", "forward")) for track in tracks}
            self._channel.connect({track: found.get(ways[track], nobody) for track in tracks}, device=platform.device())
        return self._channel


def _run_step(
    step: PipelineStep, *, tp_group: dist.ProcessGroup, told: Any, is_last_rank: bool, force_all_reduce: bool | None
) -> None:
    """Run a step between Megatron's timers, then let the loop's finalize_model_grads_func, which is told groups, finish it."""
    config, chunks = step.inputs.config, list(step.inputs.chunks)
    finalizes = config.finalize_model_grads_func is not None and not step.shape.forward_only
    embedding = schedules.clear_embedding_activation_buffer(config, chunks, is_last_rank) if finalizes else None
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    step.execute()
    if finalizes:
        schedules.finish_embedding_wgrad_compute(config, embedding, is_last_rank, tp_group)
        num_tokens = step.num_tokens if config.calculate_per_token_loss else None
        config.finalize_model_grads_func(chunks, num_tokens, pg_collection=told, force_all_reduce=force_all_reduce)
    if config.timers is not None:
        config.timers("forward-backward").stop()


_GROUPS = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]
"""Process groups that a step, or its finalizing, asks for."""


def _process_groups(communicator: P2PCommunicator | None, groups: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """Return the given process groups, or those of megatron-core's global state, as its own functions collect them."""
    if groups is None:
        if communicator is not None:
            raise ConfigError(
                "p2p_communicator was given without pg_collection; give both, or neither for the groups of parallel_state"
            )
        return ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
    missing = [name for name in _GROUPS if not hasattr(groups, name)]
    if missing:
        raise ConfigError(f"pg_collection lacks {', '.join(missing)}; set them (embd and pos_embd may be None)")
    if communicator is not None and communicator.pp_group is not groups.pp:
        raise ConfigError("p2p_communicator and pg_collection have different pipeline groups; make both with the same one")
    return groups


def _message_shapes(adjust: Callable[..., Any] | None, **sizes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of received and of sent activations."""
    shapes: tuple[Sequence[Any], Sequence[Any]] = schedules.get_tensor_shapes(**sizes), schedules.get_tensor_shapes(**sizes)
    if adjust is not None:
        shapes = adjust(*shapes)
    if any(len(found) != 1 for found in shapes):
        raise ConfigError(
            f"adjust_tensor_shapes_fn returned {len(shapes[0])} shapes to receive and {len(shapes[1])} to send; return one each"
        )
    return tuple(shapes[0][0]), tuple(shapes[1][0])


_ORDER = "it expects the order of Megatron's own schedules", "set it to False"
REFUSALS = {
    "mtp_standalone": ("its stage sends tensors of other shapes", "leave the MTP layers in the last stage"),
    "overlap_moe_expert_parallel_comm": (
        "it replaces forward and backward by pieces of both, in an order of its own",
        "set it to False",
    ),
    "hybrid_context_parallel": ("it decides the order of microbatches itself", "set it to False"),
    "use_ring_exchange_p2p": ("messages are sent by isend and irecv", "set it to False"),
    **dict.fromkeys(("fine_grained_activation_offloading", "moe_paged_stash"), _ORDER),
    "cuda_graph_impl": ("graphs are captured in the order of Megatron's own schedules", "set it to 'none'"),
}
"""Option of Megatron's config -> why it cannot be honoured, and what to do.

All others either work, or (overlap_p2p_comm, batch_p2p_comm and the like) only say how Megatron sends its messages.
"""


def check_options(config: Any, *, shape: PipelineShape, num_chunks: int, is_llm: bool = True) -> None:
    """Check that a step can honour Megatron's config; raises ConfigError that names the option and the fix.

    config: a ModelParallelConfig; num_chunks: model chunks on this rank; is_llm: True if it has the LLM, or the whole model.
    """
    for option, (reason, fix) in REFUSALS.items():
        if (value := getattr(config, option, None)) and value != "none":
            raise ConfigError(
                f"{option}={value!r} cannot be used with Braid's schedules: {reason}; {fix}, or call patches.undo() to run "
                "Megatron's own schedule"
            )
    num_stages, expected = shape.llm.num_stages, config.virtual_pipeline_model_parallel_size or 1
    if expected != shape.llm.num_chunks or num_chunks != (expected if is_llm else 1) or (num_stages == 1 and expected > 1):
        raise ConfigError(
            f"the model has {num_chunks} chunks on this rank, {shape.llm.num_chunks} on each of {num_stages} pipeline stages, "
            f"and virtual_pipeline_model_parallel_size is {config.virtual_pipeline_model_parallel_size}; give a list of as many "
            "chunks as the latter says (one chunk where there is only an encoder), and leave it out where there is one stage"
        )
    if expected > 1 and num_stages % 2 and getattr(config, "variable_seq_lengths", False):
        raise ConfigError(
            "variable_seq_lengths=True works with several model chunks per rank if the number of pipeline stages is even, so "
            f"that no rank sends and receives on one track of messages; make pipeline_model_parallel_size {num_stages} even, "
            "leave virtual_pipeline_model_parallel_size out, or pad every microbatch to seq_length and set it to False"
        )
    group_size = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if num_chunks > 1 and group_size not in (None, num_stages):
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage={group_size} would be ignored: the schedule decides the order; leave it out and "
            "choose the order by patches.apply(schedule=...)"
        )
    if shape.has_messages and config.pipeline_dtype is None:
        raise ConfigError("pipeline_dtype is None, but stages must know what they receive; set it to the dtype of activations")
