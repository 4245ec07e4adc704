"""MimoModel for Megatron's own `pretrain()`, built as in Megatron's examples: a grid and a DDP for each module."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.models.base import ModelConfig
from torch import Tensor

SEQUENCE_LENGTH, VOCABULARY, IMAGE_TOKEN, IMAGE_LENGTH = 8, 32, 31, 3
MICRO_BATCH_SIZE = 2
_BASE = ("tp", "cp", "dp", "pp")
_GROUPS = {
    **{name: name for name in _BASE},
    "dp_cp": ["dp", "cp"],
    "intra_dp_cp": ["dp", "cp"],
    "dp_cp_gtp_remat": ["dp", "cp"],
    "tp_cp": ["tp", "cp"],
    "tp_dp_cp": ["tp", "dp", "cp"],
    "mp": ["tp", "pp"],
    "intra_dist_opt": [*_BASE],
}
_EXPERT_GROUPS = {
    **{name: name for name in ("ep", "expt_tp", "expt_dp")},
    "intra_expt_dp": "expt_dp",
    "tp_ep": ["expt_tp", "ep"],
    "tp_ep_pp": ["expt_tp", "ep", "pp"],
}


class MimoSizes(NamedTuple):
    """Ranks: those of the encoder come first."""

    vision_dp: int
    llm_pp: int
    llm_dp: int
    vision_pp: int = 1
    shares_ranks: bool = False
    """True: all modules on all ranks, in one pipeline stage."""

    @property
    def num_ranks(self) -> int:
        """Of all modules, on ranks of their own."""
        return self.vision_dp * self.vision_pp + self.llm_pp * self.llm_dp


class MimoTopology:
    """Grids and groups of the modules, and the communicator between them."""

    def __init__(self, sizes: MimoSizes) -> None:
        """Collective over the world."""
        self.sizes = sizes
        num_encoding = sizes.vision_dp * sizes.vision_pp * (not sizes.shares_ranks)
        self.grids = {
            "vision": _make_grid(0, sizes.vision_dp, sizes.vision_pp),
            LANGUAGE: _make_grid(num_encoding, sizes.llm_dp, sizes.llm_pp),
        }
        self.groups = {name: _groups_of(grid) for name, grid in self.grids.items() if grid.is_current_rank_in_grid()}
        self.own = self.groups.get(LANGUAGE) or self.groups["vision"]
        self.communicator, self.collection = None, self.own
        self.open_data = partial(_open_data, sizes.llm_dp * MICRO_BATCH_SIZE, self.own.dp)
        self.open_data.is_distributed = True  # type: ignore[attr-defined]

        if not sizes.shares_ranks:
            self.collection = MultiModuleProcessGroupCollection(self.groups, LANGUAGE if LANGUAGE in self.groups else None)
            self.communicator = MultiModulePipelineCommunicator(
                self.grids,
                {"vision": [LANGUAGE], LANGUAGE: []},
                language_config(),
                dim_mapping={"s": 0, "b": 1, "h": 2},
                module_output_ndim={"vision": 2},
            )


@dataclass(kw_only=True)
class MimoBuildConfig(ModelConfig):
    builder: ClassVar[str] = "tests.distributed.pretrain_mimo.MimoBuilder"
    _topology: MimoTopology | None = field(default=None)


class MimoBuilder:
    def __init__(self, config: MimoBuildConfig) -> None:
        assert config._topology is not None
        self.topology = config._topology

    def build_distributed_models(self, **_: Any) -> list[MimoModel]:
        """Return the model; its config says how gradients are finalized."""
        groups, config = self.topology.groups, language_config()
        own = groups.get(LANGUAGE)
        language = {"config": config, "transformer_layer_spec": get_gpt_layer_local_spec(), "vocab_size": VOCABULARY}
        language |= {"max_sequence_length": SEQUENCE_LENGTH, "position_embedding_type": "rope"}
        language |= {"share_embeddings_and_output_weights": False, "pg_collection": own}
        if own is not None:
            language |= {"pre_process": own.pp.rank() == 0, "post_process": own.pp.rank() == own.pp.size() - 1}
        vision = ModuleSpec(
            module=VisionModalitySubmodules,
            submodules={
                "encoders": {"vit": ModuleSpec(module=_Encoder, params={"config": config, "groups": groups.get("vision")})}
            },
            params={"pg_collection": groups.get("vision")},
        )
        model = MimoModel(
            MimoModelConfig(
                language_model_spec=ModuleSpec(module=GPTModel, params=language),
                modality_submodules_spec={"vision": vision},
                special_token_ids={"vision": IMAGE_TOKEN},
                module_to_grid_map=self.topology.grids,
            )
        )
        _fill_weights(model)
        options = DistributedDataParallelConfig(use_distributed_optimizer=get_args().use_distributed_optimizer)
        if own is not None:
            model.language_model = DistributedDataParallel(config, options, model.language_model, pg_collection=own)
        if "vision" in groups:
            wrapped = DistributedDataParallel(
                config, options, model.modality_submodules["vision"], pg_collection=groups["vision"]
            )
            model.modality_submodules["vision"] = wrapped
        model.model_type, model.pg_collection = ModelType.encoder_or_decoder, self.topology.own
        model.rng_state_key_prefix = "language." if own is not None else "encoder."
        model.config.finalize_model_grads_func = partial(_finalize, model, groups)
        return [model]


def language_config() -> Any:
    """Return the LLM's config; losses are means over the tokens of all replicas."""
    config = core_transformer_config_from_args(get_args())
    config.variable_seq_lengths, config.moe_token_dispatcher_type = True, "alltoall"
    config.calculate_per_token_loss = True
    return config


class _Encoder(MegatronModule):
    """Turns an image of four numbers into vectors for the LLM."""

    def __init__(self, config: Any, groups: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.tp_group = groups.tp
        self.inner = torch.nn.Linear(4, IMAGE_LENGTH * 16)
        self.outer = torch.nn.Linear(16, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: (images, 4)."""
        return self.outer(self.inner(pixels).view(-1, 16).tanh())


def _open_data(width: int, replicas: dist.ProcessGroup, _: Any, vp_stage: int | None = None) -> tuple[Iterator[Tensor], ...]:
    """Return the iterators of training, validation and test, each of one replica's part of every microbatch of all."""
    args, share, rank = get_args(), width // replicas.size(), replicas.rank()
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    own = range(rank * share, (rank + 1) * share)
    return tuple(_read(kind, number // width, width, own) for kind, number in enumerate(consumed))


def _read(kind: int, first: int, width: int, own: range) -> Iterator[Tensor]:
    for index in count(first):
        yield torch.stack([_sample(kind, index * width + each) for each in own])


def _sample(kind: int, number: int) -> Tensor:
    """Return tokens and labels."""
    return torch.from_numpy(np.random.default_rng((kind, number)).integers(VOCABULARY - 1, size=(2, SEQUENCE_LENGTH)))


def first_number(batch: Tensor) -> int:
    return int(batch.flatten()[0])


def forward_step(batches: Iterator[Tensor], model: MimoModel) -> Any:
    tokens, labels = next(batches).unbind(1)
    tokens = tokens.clone()
    tokens[:, 1 : 1 + IMAGE_LENGTH] = IMAGE_TOKEN
    images = {"vision": {"vit": {"pixels": labels[:, :4].float().sin()}}}
    positions = torch.arange(SEQUENCE_LENGTH).expand_as(tokens)
    return model(tokens, positions, None, labels=labels, modality_inputs=images)[0], loss_of_tokens


def loss_of_tokens(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, num_tokens = losses.sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.to(total)])}


def _finalize(model: MimoModel, groups: dict[str, Any], _: Any, num_tokens: Tensor, **options: Any) -> None:
    """Reduce each module's gradients over its replicas, and divide them by the tokens of all."""
    dist.all_reduce(total := num_tokens.float())
    found = {LANGUAGE: model.language_model, **model.modality_submodules}
    for name, own in groups.items():
        finalize_model_grads([found[name]], None, **options | {"pg_collection": own})
        found[name].scale_gradients(1 / total)


def _fill_weights(model: MimoModel) -> None:
    """Give a model weights that follow from their names and the numbers of their layers."""
    layers = [each for each in model.modules() if isinstance(each, TransformerLayer)]
    known = {id(each): f"{layer.layer_number} {name}" for layer in layers for name, each in layer.named_parameters()}
    for name, parameter in model.named_parameters():
        random = np.random.default_rng(zlib.crc32(known.get(id(parameter), name).encode()))
        parameter.data.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape), scale=0.1)))


def _make_grid(first: int, num_replicas: int, num_stages: int) -> HyperCommGrid:
    grid = HyperCommGrid([1, 1, num_replicas, num_stages], [*_BASE], rank_offset=first, backend="gloo")
    expert = ["expt_tp", "ep", "expt_dp", "pp"]
    grid.register_view("expert", shape=[1, 1, num_replicas, num_stages], dim_names=expert, shared_dims=["pp"])
    for names, view in ((_GROUPS, None), (_EXPERT_GROUPS, "expert")):
        for axes in {str(each): each for each in names.values()}.values():
            grid.create_pg(axes, view=view)
    return grid


def _groups_of(grid: HyperCommGrid) -> ProcessGroupCollection:
    own = ProcessGroupCollection()
    for names, view in ((_GROUPS, None), (_EXPERT_GROUPS, "expert")):
        for name, axes in names.items():
            setattr(own, name, grid.get_pg(axes, view=view))
    own.embd = own.pos_embd = None
    return own
