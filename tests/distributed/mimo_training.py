"""A compared case with images trained by megatron-core's own MIMO: MimoModel under Megatron's 1F1B, its encoders on other ranks.

MIMO takes any modules as encoders; here they are Braid's, so that both train one model. Its LLM is megatron-core's GPTModel.
Gradients are summed over data parallel ranks when the schedule has run, as by MIMO's DDP without overlap.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.pipeline_parallel import bridge_communicator, schedules
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

from megatron.runtime import patches
from megatron.runtime.feed.packing import pack_encoder_microbatch
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.values.assignment import Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from tests.distributed import megatron_training
from tests.distributed.braid_training import MICRO_BATCH_SIZE, NUM_STEPS, ComparedCase, Weights
from tests.distributed.random_source import RandomSource

LANGUAGE = MIMO_LANGUAGE_MODULE_KEY
FIRST_IMAGE_TOKEN = -200
_DIMENSIONS = ("tp", "cp", "pp", "dp", "ep", "expt_dp")


class MimoLayout(NamedTuple):
    """Ranks: those of each encoder come first."""

    vision_dp: int
    llm_pp: int
    llm_dp: int
    llm_tp: int = 1
    num_encoders: int = 1
    shares_ranks: bool = False
    """True: a plan lays all modules over all ranks."""
    llm_chunks: int = 1
    """Model chunks (virtual stages) on each of the LLM's ranks."""

    @property
    def num_ranks(self) -> int:
        """Of all modules."""
        if self.shares_ranks:
            return self.llm_pp * self.llm_dp * self.llm_tp
        return self.num_encoders * self.vision_dp + self.llm_pp * self.llm_dp * self.llm_tp


def mimo_losses(
    case: ComparedCase,
    weights: Weights,
    layout: MimoLayout,
    schedule: str | None = None,
    balance: str = "none",
    plan: Plan | None = None,
) -> list[float]:
    """Train 20 steps on this rank, on Megatron's own schedule or Braid's; returns the losses that it has summed up.

    plan: gives layers their process groups.
    """
    groups = {}
    if schedule is not None:
        model = case.graph if plan is not None else None
        groups = patches.apply(
            schedule=schedule, model=model, plan=plan, balance=balance, length=lambda batch: int((batch.token_ids < 0).sum())
        )
    try:
        with mimo_without_cuda():
            trained = MimoTraining(case, weights, layout, groups=groups)
            return [trained.train_step(trained.prepare(case.batch_of_step(number))) for number in range(NUM_STEPS)]
    finally:
        patches.undo()


@contextmanager
def mimo_without_cuda() -> Iterator[None]:
    """Replace what `megatron_without_cuda` does, and NCCL, which the bridge between modules asks for by name.

    MIMO makes its own process groups, but attention still takes a buffer that Megatron's global groups come with.
    """
    parallel_state.destroy_model_parallel()
    parallel_state._set_global_memory_buffer()
    try:
        with megatron_training.megatron_without_cuda(), patch.object(bridge_communicator, "dist", Gloo()):
            yield
    finally:
        BridgeCommunicator.destroy_bridge_pgs()
        BridgeCommunicator.destroy_broadcast_pgs()
        parallel_state.destroy_model_parallel()


class MimoTraining:
    def __init__(
        self, case: ComparedCase, weights: Weights, layout: MimoLayout, groups: Mapping[str, ProcessGroupCollection] | None = None
    ) -> None:
        self.case, self.layout = case, layout
        self.encoders = [name for name in case.graph.unit_names if name != case.graph.backbone.name]
        assert len(self.encoders) == layout.num_encoders
        self.communicator, self.collection, self.grids = None, None, None
        if layout.shares_ranks:
            names = {name: LANGUAGE if name == case.graph.backbone.name else name for name in case.graph.unit_names}
            self.groups = {names[name]: each for name, each in (groups or {}).items()}
            self.chunks = self._build_chunks(weights)
        else:
            self._place_modules(weights, groups)
        self.optimizer = megatron_training.build_optimizer(torch.nn.ModuleList(self.chunks))

    def _place_modules(self, weights: Weights, groups: Mapping[str, ProcessGroupCollection] | None) -> None:
        case, layout = self.case, self.layout
        self.grids = {
            name: _make_grid(place * layout.vision_dp, num_stages=1, num_replicas=layout.vision_dp)
            for place, name in enumerate(self.encoders)
        }
        first = layout.vision_dp * layout.num_encoders
        self.grids[LANGUAGE] = _make_grid(first, num_stages=layout.llm_pp, num_replicas=layout.llm_dp, num_shards=layout.llm_tp)
        name = [*(name for name in self.encoders for _ in range(layout.vision_dp)), LANGUAGE][min(dist.get_rank(), first)]
        grid = self.grids[name]
        own = ProcessGroupCollection(**{name: grid.get_pg(name) for name in ("tp", "cp", "pp", "dp", "ep", "expt_dp")})
        own.dp_cp = grid.get_pg(["dp", "cp"])
        own = (groups or {}).get(case.graph.backbone.name if name == LANGUAGE else name, own)
        own.embd = own.pos_embd = None
        self.groups = {name: own}
        self.chunks = self._build_chunks(weights)
        self.communicator = MultiModulePipelineCommunicator(
            self.grids,
            {**{name: [LANGUAGE] for name in self.encoders}, LANGUAGE: []},
            self.chunks[0].config,
            dim_mapping={"s": 0, "b": 1, "h": 2},
            module_output_ndim=dict.fromkeys(self.encoders, 2),
        )
        self.collection = MultiModuleProcessGroupCollection(self.groups, LANGUAGE if name == LANGUAGE else None)

    def prepare(self, source: RandomSource) -> dict[str, list["MimoMicrobatch"]]:
        """Return this rank's part of a global batch: samples in order, a microbatch to each replica of the LLM in turn.

        An encoder's replica has those of several replicas of the LLM at once.
        """
        width = self.layout.llm_dp * MICRO_BATCH_SIZE
        return {
            name: [
                MimoMicrobatch.load(source, range(first, first + width // groups.dp.size()), of=name)
                for first in range(groups.dp.rank() * width // groups.dp.size(), len(source), width)
            ]
            for name, groups in self.groups.items()
        }

    def train_step(self, microbatches: Mapping[str, Sequence["MimoMicrobatch"]]) -> float:
        """Train on a global batch; returns the loss that this rank has summed up, 0 but on the LLM's last stage."""
        num_targets = sum(shape.num_target_tokens for shape in self.case.shapes)
        self.optimizer.zero_grad()
        stages = self.layout.llm_pp if self.communicator is None else self.communicator.total_stages
        data: dict[str, Any] = {name: iter(each) for name, each in microbatches.items() if name != LANGUAGE}
        if LANGUAGE in microbatches:
            data[self.case.graph.backbone.name] = [iter(microbatches[LANGUAGE]) for _ in self.chunks]
        found = schedules.get_forward_backward_func(pp_size=stages, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else next(iter(data.values())),
            model=self.chunks,
            num_microbatches=len(next(iter(microbatches.values()))),
            seq_length=self.case.sequence_length,
            micro_batch_size=MICRO_BATCH_SIZE,
            p2p_communicator=self.communicator,
            pg_collection=self.collection,
        )
        gradients = []
        for name, groups in self.groups.items():
            chunks = self.chunks if name == LANGUAGE else self.chunks[:1]
            modules = [each.language_model if name == LANGUAGE else each.modality_submodules[name] for each in chunks]
            gradients.append(([parameter.grad for module in modules for parameter in module.parameters()], groups.dp.size()))
            for gradient in gradients[-1][0]:
                dist.all_reduce(gradient, group=groups.dp)
        megatron_training.scale_gradients(gradients, num_targets=num_targets)
        self.optimizer.step()
        return sum(found) / num_targets

    def _build_chunks(self, weights: Weights) -> list[MimoModel]:
        return [self._build_chunk(weights, index) for index in range(self.layout.llm_chunks if LANGUAGE in self.groups else 1)]

    def _build_chunk(self, weights: Weights, index: int) -> MimoModel:
        num_stages, num_chunks = self.layout.llm_pp, self.layout.llm_chunks
        language_groups = self.groups.get(LANGUAGE, next(iter(self.groups.values())))
        stage = language_groups.pp.rank() + index * num_stages
        config = megatron_training.language_config(
            self.case,
            num_stages=num_stages,
            virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
            overlap_p2p_comm=num_chunks > 1,
            batch_p2p_comm=num_chunks == 1,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            tensor_model_parallel_size=self.layout.llm_tp,
        )
        language = {"config": config, "pre_process": stage == 0, "post_process": stage == num_stages * num_chunks - 1}
        language |= {"vp_stage": index if num_chunks > 1 else None, "pg_collection": language_groups}
        language |= megatron_training.language_arguments(self.case)
        encoders = {
            name: ModuleSpec(module=_Encoder, params={"case": self.case, "groups": self.groups.get(name), "name": name})
            for name in (self.encoders if index == 0 or self.grids else ())
        }
        model = MimoModel(
            MimoModelConfig(
                language_model_spec=ModuleSpec(module=GPTModel, params=language),
                modality_submodules_spec={
                    name: ModuleSpec(module=VisionModalitySubmodules, submodules={"encoders": {"vit": encoder}})
                    for name, encoder in encoders.items()
                },
                special_token_ids={name: _image_token(self.case.graph, name) for name in self.encoders},
                module_to_grid_map=self.grids,
            )
        ).double()
        for name in self.groups:
            if name == LANGUAGE:
                megatron_training.load_language_weights(model.language_model, self.case, weights["llm"])
            elif name in encoders:
                model.modality_submodules[name].encoders["vit"].load(weights[name])
        return model


@dataclass(frozen=True)
class MimoMicrobatch:
    token_ids: Tensor
    labels: Tensor
    is_target: Tensor
    images: dict[str, Any] | None
    num_tokens: int  # without padding

    @classmethod
    def load(cls, source: RandomSource, samples: Sequence[int], *, of: str) -> "MimoMicrobatch":
        """Return some samples of a batch, padded to the longest of them, with the images of one module."""
        texts = [source.text(index) for index in samples]
        columns = ("token_ids", "labels", "is_target")
        token_ids, labels, is_target = (
            pad_sequence([torch.from_numpy(getattr(text, column)) for text in texts], batch_first=True) for column in columns
        )
        for row, (index, text) in enumerate(zip(samples, texts, strict=True)):
            for item, start, length in text.item_starts:
                token_ids[row, start : start + length] = _image_token(source.graph, source.shapes[index].items[item][0])
        images = {of: {"vit": {"batch": _pack_images(source, samples, of)}}} if of != LANGUAGE else None
        return cls(token_ids, labels, is_target, images, sum(len(text.token_ids) for text in texts))


class _Encoder(Module):
    """Braid's encoder with its projector, whole."""

    def __init__(self, case: ComparedCase, groups: ProcessGroupCollection, name: str) -> None:
        super().__init__()
        unit = case.graph.unit(name)
        self.stage = UnitStage(
            graph=case.graph,
            unit_name=name,
            layers=range(len(unit.layers)),
            groups=groups,
            options=BuildOptions(torch.float64),
        )

    def load(self, weights: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.stage.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name]))

    def forward(self, batch: PackedInput) -> Tensor:
        output = self.stage(None, batch)
        assert isinstance(output, Tensor)
        return output


class Gloo:
    """torch.distributed as the bridge between modules sees it, which asks for NCCL by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def new_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        return dist.new_group(ranks, backend="gloo")

    def new_subgroups_by_enumeration(self, ranks: Sequence[Sequence[int]], backend: str) -> Any:
        return dist.new_subgroups_by_enumeration(ranks, backend="gloo")


def _make_grid(first_rank: int, *, num_stages: int, num_replicas: int, num_shards: int = 1) -> HyperCommGrid:
    grid = HyperCommGrid(
        [num_shards, 1, num_stages, num_replicas, 1, 1], list(_DIMENSIONS), rank_offset=first_rank, backend="gloo"
    )
    for name in (*_DIMENSIONS, ["dp", "cp"]):
        grid.create_pg(name)
    return grid


def _image_token(graph: ModelGraph, encoder: str) -> int:
    return FIRST_IMAGE_TOKEN - graph.unit_names.index(encoder)


def _pack_images(source: RandomSource, samples: Sequence[int], encoder: str) -> PackedInput:
    atoms = [Atom(each, item) for each in samples for item, (unit, *_) in enumerate(source.shapes[each].items) if unit == encoder]
    item_input = source.graph.unit(encoder).item_input
    packed = pack_encoder_microbatch(atoms, source=source, item_input=item_input, with_pixels=True)
    assert packed.patches is not None
    return replace(packed, patches=packed.patches.double())


def forward_step(batches: Iterator[MimoMicrobatch], model: MimoModel) -> tuple[Any, Callable[..., Any]]:
    batch = next(batches)
    positions = torch.arange(batch.token_ids.shape[1]).expand_as(batch.token_ids)
    output, _ = model(batch.token_ids, positions, None, labels=batch.labels, modality_inputs=batch.images)
    return output, partial(megatron_training.summed_loss, batch.is_target)
