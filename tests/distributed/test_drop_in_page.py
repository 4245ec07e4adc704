"""docs/drop_in.md as it stands: its blocks run in tiny loops."""

import re
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.runtime import patches
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.model_graph import ModelGraph
from tests.distributed import drop_in_training as loop
from tests.distributed.braid_training import MICRO_BATCH_SIZE, WITH_IMAGES, initial_weights
from tests.distributed.launch import REPOSITORY
from tests.distributed.rank_pool import RankPool

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHAPE = {"hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
VISION = {"role": "encoder", "num_layers": 1, "image": {"patch_size": 2}, **SHAPE}
MODEL = {"units": {"vision": VISION, "llm": {"role": "backbone", "num_layers": 2, **SHAPE}}}
SIZES = {"vision": UnitSizes(data_parallel_size=1), "llm": UnitSizes(pipeline_parallel_size=2, data_parallel_size=1)}
LLAVA = loop.LoopCase(2, has_images=True, options={"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"})
TEXT = loop.LoopCase(1)
STEP = {"num_microbatches": TEXT.num_microbatches, "seq_length": loop.SEQUENCE_LENGTH, "micro_batch_size": loop.MICRO_BATCH_SIZE}
Names = dict[str, Any]
"""What a block finds and leaves; `reported` has what its steps returned."""


def run_step(names: Names, **step: Any) -> None:
    names["reported"] += schedules.get_forward_backward_func()(**step)


@contextmanager
def in_a_loop(names: Names) -> Iterator[None]:
    """`train()` runs a step on three replicas, whose batches are dictionaries."""

    def train() -> None:
        loop.connect(chunks := loop.build_chunks(TEXT, {}), TEXT)
        batches = ({"cu_seqlens": [0, each[0].numel()], "batch": each} for each in loop.microbatches(TEXT, 0))
        run_step(names, forward_step_func=forward_step, model=chunks, data_iterator=batches, **STEP)

    def forward_step(batches: Iterator[Any], model: Any) -> Any:
        return loop.forward_step([], iter([next(batches)["batch"]]), model)

    parallel_state.initialize_model_parallel()
    names["train"] = train
    with loop.without_cuda():
        yield


@contextmanager
def with_own_mimo(names: Names, weights: Any) -> Iterator[None]:
    """A loop of megatron-core's MIMO."""
    from tests.distributed.mimo_training import MimoLayout, MimoTraining, forward_step, mimo_without_cuda

    with mimo_without_cuda():
        trained = MimoTraining(WITH_IMAGES, weights, MimoLayout(1, 2, 1))
        (microbatches,) = trained.prepare(WITH_IMAGES.batch_of_step(0)).values()
        names |= {"forward_step": forward_step, "batches": iter(microbatches), "model": trained.chunks, "vp_size": None}
        names |= {"num_microbatches": len(microbatches), "seq_length": WITH_IMAGES.sequence_length}
        names |= {"micro_batch_size": MICRO_BATCH_SIZE, "pp_size": 3}
        names |= {"communicator": trained.communicator, "collection": trained.collection}
        names["get_forward_backward_func"] = lambda *_: partial(run_step, names)
        yield


@contextmanager
def with_images(names: Names) -> Iterator[None]:
    """A loop that builds LLaVAModel of a plan's groups."""

    def build_model(**parts: bool) -> Any:
        loop.connect(chunks := loop.build_chunks(LLAVA, parts), LLAVA)
        return chunks[0]

    names |= {"build_model": build_model, "read_batches": partial(loop.microbatches, LLAVA, 0)}
    names |= {"step": {**STEP, "forward_step_func": partial(loop.forward_step, [])}}
    names["get_forward_backward_func"] = lambda: partial(run_step, names)
    with loop.without_cuda():
        yield


@contextmanager
def with_layers(names: Names) -> Iterator[None]:
    """Configs and layers of an encoder and its projector."""
    config = TransformerConfig(num_layers=1, perform_initialization=False, bias_activation_fusion=False, **SHAPE)
    names |= {"vision_config": config, "vision_layer": get_vit_layer_with_local_spec(), "projector_config": config}
    names |= {"mlp": MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)}
    names["CLIPViTModel"] = partial(CLIPViTModel, ln_pre_impl=WrappedTorchNorm, ln_post_impl=WrappedTorchNorm)
    names["MultimodalProjector"] = MultimodalProjector
    with loop.without_cuda():
        yield
    names["reported"] += [names[name] for name in ("encoder", "projector") if name in names]


def run_block(block: str, folder: Path, make: Callable[..., Any], *words: Any) -> int:
    """Run a block on this rank; returns how much it reported."""
    parallel_state.destroy_model_parallel()
    names: Names = {"patches": patches, "reported": []}
    before = schedules.get_forward_backward_func
    try:
        with chdir(folder), make(names, *words):
            exec(block, names)
        assert schedules.get_forward_backward_func is before, "the block gives Megatron its function back"
    finally:
        patches.undo()
        parallel_state.destroy_model_parallel()
    return len(names["reported"])


def run_block_in_pretrain(block: str) -> int:
    """Run a block that calls `pretrain()`; returns how many losses that logged."""
    from megatron.training import pretrain

    from tests.distributed.pretrain_loop import pretrain_model

    def call(config: Any, open_data: Any, _: Any, forward_step: Any, **providers: Any) -> None:
        names = {"patches": patches, "pretrain": pretrain, "ModelType": ModelType, "config": config, **providers}
        exec(block, names | {"train_valid_test_datasets_provider": open_data, "forward_step": forward_step})

    return len(pretrain_model({}, None, call=call).logged)


@pytest.fixture
def blocks(tmp_path: Path) -> list[str]:
    """Returns the blocks, behind the files that they name."""
    model = ModelGraph.from_dict(MODEL)
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL, sort_keys=False))
    plan_disaggregated(model, sizes=SIZES, world_size=3).to_file(tmp_path / "plan.yaml")
    return BLOCK.findall((REPOSITORY / "docs" / "drop_in.md").read_text())


@pytest.mark.parametrize(
    ("number", "make", "expected"),
    [(0, in_a_loop, [6] * 3), (3, with_images, [0, 0, 6]), (4, in_a_loop, [6] * 3), (5, with_layers, [2, 0, 0])],
)
def test_the_blocks_run(ranks: RankPool, blocks: list[str], tmp_path: Path, number: int, make: Any, expected: list[int]) -> None:
    assert len(blocks) == 6
    assert ranks.run(run_block, blocks[number], tmp_path, make, world_size=3) == expected


def test_the_block_with_pretrain_runs(ranks: RankPool, blocks: list[str]) -> None:
    pytest.importorskip("megatron.training", reason="megatron-core 0.19 has it (Python 3.12)", exc_type=ImportError)
    assert min(ranks.run(run_block_in_pretrain, blocks[1], world_size=2)) >= 5


def test_the_block_with_mimo_runs(ranks: RankPool, blocks: list[str], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.models.mimo.config.role", reason="megatron-core 0.19 has it", exc_type=ImportError)
    (weights,) = ranks.run(initial_weights, WITH_IMAGES, world_size=1)
    *others, last = ranks.run(run_block, blocks[2], tmp_path, with_own_mimo, weights, world_size=3)
    assert others == [0, 0] and last > 0
