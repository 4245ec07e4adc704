"""Opens all units of a stored model on one process, without the flags of the run that trained it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch.distributed import FileStore  # type: ignore[attr-defined]

from megatron.runtime import platform
from megatron.runtime.checkpoint.checkpoint import load_checkpoint
from megatron.runtime.checkpoint.manifest import read_newest
from megatron.runtime.checkpoint.megatron_weights import embeddings_of, has_state, read_shapes
from megatron.runtime.checkpoint.storage import read_index
from megatron.runtime.hugging_face.load_weights import load_hugging_face
from megatron.runtime.hugging_face.weight_files import WeightFiles
from megatron.runtime.session import Session, SessionOptions
from multimodal.attention.bitfield import MaskMode
from multimodal.cost.layers.registry import read_model
from multimodal.data.chat.text_settings import TextSettings
from multimodal.hugging_face.registry import CONFIG_NAME
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import ModelGraph

_WORD_EMBEDDINGS = "model.{}.layers.0.word_embeddings.weight"


class StoredModel(NamedTuple):
    """A model in files."""

    graph: ModelGraph
    dtype: torch.dtype
    vocab_size: int
    """Padded size of the vocabulary."""
    texts: TextSettings
    """The tokenizer and chat template that it was trained with, or brings along."""
    mask: MaskMode = MaskMode.CAUSAL

    def with_texts(self, **changes: str) -> "StoredModel":
        """Return the same model with another tokenizer or chat template; changes: fields of TextSettings."""
        kind = {"tokenizer_type": "HuggingFaceTokenizer"} if "tokenizer_model" in changes else {}
        return self._replace(texts=replace(self.texts, **kind, **changes))


def find_checkpoint(folder: Path) -> StoredModel:
    """Describe the newest checkpoint of a run, or one of its checkpoints; raises CheckpointError."""
    path, manifest = read_newest(folder)
    graph = ModelGraph.from_dict(manifest.model)
    index = read_index(path, files=manifest.files, crc32=manifest.index_crc32)
    embeddings = index[_WORD_EMBEDDINGS.format(graph.backbone.name)]
    run = manifest.run_state
    texts = TextSettings(run.get("tokenizer_type", "ByteTokenizer"), run.get("tokenizer_model"), run.get("chat_template"))
    mask = MaskMode(run.get("attention_mask", MaskMode.CAUSAL))
    return StoredModel(graph, embeddings.dtype, embeddings.shape[0], texts, mask)


def find_hugging_face(folder: Path, *, vocab_multiple: int = 128, vocab_size: int = 0) -> StoredModel:
    """Describe a folder of Hugging Face, its vocabulary, or a larger `vocab_size`, padded to a multiple; raises ModelError."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give a folder of Hugging Face that is on this machine")
    graph = read_model(folder)
    if vocab_size > (graph.backbone.vocab_size or 0):
        larger = replace(graph.backbone, vocab_size=vocab_size)
        graph = replace(graph, units=tuple(larger if unit is graph.backbone else unit for unit in graph.units))
    with WeightFiles(folder) as files:
        dtype = max((weight.dtype for weight in files.weights.values()), key=lambda dtype: dtype.itemsize)
    padded = -(-(graph.backbone.vocab_size or 1) // vocab_multiple) * vocab_multiple
    return StoredModel(graph, dtype, padded, TextSettings("HuggingFaceTokenizer", str(folder)))


def find_megatron(folder: Path, model: Path, *, vocab_multiple: int = 128) -> StoredModel:
    """Describe a checkpoint of Megatron whose model a file has, its vocabulary padded; raises CheckpointError, ModelError."""
    graph, shapes = read_model(model), read_shapes(folder)
    embeddings = shapes[embeddings_of(shapes, folder=folder)]
    rows = embeddings.global_shape[0]
    if graph.backbone.vocab_size is not None:
        rows = -(-graph.backbone.vocab_size // vocab_multiple) * vocab_multiple
    dtype = max((shape.dtype for shape in shapes.values()), key=lambda dtype: dtype.itemsize)
    dtype = embeddings.dtype if has_state(folder) else dtype  # what is of more bits is in the optimizer's state, too
    return StoredModel(graph, dtype, rows, TextSettings("ByteTokenizer"))


OpenedModel = tuple[Session, StoredModel]
"""A model in memory, and the files that it comes from."""


@contextmanager
def empty_session(model: StoredModel, *, optimizer: OptimizerConfig | None = None) -> Iterator[Session]:
    """Yield a session of the whole model, all weights 0, on this process alone; raises ConfigError if it is a rank already."""
    if dist.is_initialized():
        raise ConfigError(
            "a model is opened by a process alone, and torch.distributed is initialised in this one; close the model that is "
            "open, or open this one in a process of its own"
        )
    platform.install()
    sizes = {name: UnitSizes(data_parallel_size=1) for name in model.graph.unit_names}
    plan = plan_colocated(model.graph, sizes=sizes, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        try:
            build = BuildOptions(model.dtype, attention_mask=model.mask)
            options = SessionOptions(model.graph, build, model.vocab_size, optimizer=optimizer, build_stage=_build_empty)
            yield Session(options, plan=plan)
        finally:
            dist.destroy_process_group()


@contextmanager
def open_model(
    folder: str | Path, *, is_hugging_face: bool | None = None, dtype: torch.dtype | None = None
) -> Iterator[OpenedModel]:
    """Yield the whole model of a run's checkpoints, or of a folder of Hugging Face, with its weights, for forwards only.

    Generators have the averages of their weights, if kept. is_hugging_face: None: if it holds a config.json. dtype: None: as
    stored. Raises CheckpointError or ModelError, and ConfigError in a process that is a rank already.
    """
    folder = Path(folder)
    if is_hugging_face is None:
        is_hugging_face = (folder / CONFIG_NAME).is_file()
    model = find_hugging_face(folder) if is_hugging_face else find_checkpoint(folder)
    frozen = (replace(unit, freeze_module=True, freeze_projector=True) for unit in model.graph.units)
    model = model._replace(dtype=dtype or model.dtype, graph=replace(model.graph, units=tuple(frozen)))  # no gradients' buffers
    with empty_session(model) as session:
        if is_hugging_face:
            load_hugging_face(folder, session=session)
        else:
            load_checkpoint(folder, session=session, load_optimizer=False, load_rng=False, takes_averages=True)
        for stage in session.stages.values():
            stage.eval()
        yield session, model


@torch.no_grad()
def _build_empty(*, stage_index: int, **parts: Any) -> UnitStage:
    stage = UnitStage(**parts)
    for parameter in stage.parameters():
        parameter.zero_()
    return stage
