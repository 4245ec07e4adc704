"""A model of transformers under a plan here, and its gradients under the names that they have here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.hugging_face.load_weights import load_hugging_face
from megatron.runtime.hugging_face.named_weights import as_in_files, name_weights
from megatron.runtime.hugging_face.save_weights import save_hugging_face
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import model_tensors
from megatron.runtime.training.trainer import build_scheduler
from multimodal.attention.block_attention import capped
from multimodal.data.sample_source import SampleText
from multimodal.hugging_face.architecture import Architecture
from multimodal.hugging_face.registry import read_config
from tests.distributed.gradient_case import GradientCase, RankGradients, build_session, plan_case, run_step
from tests.distributed.random_source import RandomSource

RATE, DECAY, BETAS = 0.01, 0.1, (0.9, 0.99)
"""Of AdamW."""
Marks = tuple[tuple[str, int, int], ...]
"""Unit, and the tokens that stand before and behind its items."""


@dataclass(frozen=True)
class PaddedSource(RandomSource):
    """Draws token ids below `num_tokens`; `vocab_size` is padded."""

    num_tokens: int = 0
    marks: Marks = ()

    def text(self, index: int) -> SampleText:
        text = RandomSource(self.graph, self.shapes, self.num_tokens, self.seed, self.num_between).text(index)
        for item, start, length in text.item_starts:
            for unit, before, behind in self.marks:
                if self.shapes[index].items[item][0] == unit:
                    text.token_ids[start - 1], text.token_ids[start + length] = before, behind
        return text


@dataclass(frozen=True)
class FromFolder:
    """Runs a case from the weights of a folder, and writes them into another where one is named."""

    folder: Path
    target: Path | None = None
    stepped: Path | None = None
    """Where a folder is named, a step of AdamW follows, and what it gives is written there."""

    def load(self, session: Session) -> None:
        load_hugging_face(self.folder, session=session)

    def session(self, case: GradientCase, **options: Any) -> Session:
        session = build_session(case, **options)
        self.load(session)
        return session

    def __call__(self, case: GradientCase) -> RankGradients:
        session = self.session(case, optimizer=None if self.stepped is None else one_step_config())
        if self.target is not None:
            save_hugging_face(self.target, session=session, like=self.folder)
        if self.stepped is not None:
            build_scheduler(OptimizerSettings(lr=RATE, weight_decay=DECAY), session, train_iters=1)  # says what decays
        found = run_step(session, plan_case(case))
        if self.stepped is not None:
            session.step_optimizers(session.gradient_norm(), gathers_later=False)
            save_hugging_face(self.stepped, session=session, like=self.folder)
        return found


def one_step_config() -> OptimizerConfig:
    return build_optimizer_config(
        lr=RATE, min_lr=0.0, weight_decay=DECAY, betas=BETAS, eps=1e-8, clip_grad=0.0, dtype=torch.float64
    )


class Alone(NamedTuple):
    logits: list[np.ndarray]
    """Of the targets of every microbatch, in order."""
    expected: Mapping[tuple[str, str], np.ndarray]
    """The gradients of transformers, by unit and parameter."""
    found: RankGradients


def run_alone(run: FromFolder, case: GradientCase, own: Path, theirs: Mapping[str, np.ndarray]) -> Alone:
    """Run on one rank; theirs: gradients of transformers' parameters by key.

    The model is written into `own` as its family has it, and not like the folder, of which it has the special tokens alone.
    """
    session, logits = run.session(case), []
    architecture, config = read_config(run.folder)
    tokens = {name: config[key] for name, key in architecture.placeholders.items() if key in config}
    save_hugging_face(own, session=session, special_tokens=tokens)
    if run.target is not None:
        save_hugging_face(run.target, session=session, like=run.folder)
    (stage,) = [stage for (unit, _), stage in session.stages.items() if unit == case.graph.backbone.name]
    head: torch.nn.Module = stage.layers[str(len(stage.unit.layers) - 1)].output_layer  # type: ignore[union-attr, assignment]
    softcap = stage.unit.transformer.logit_softcap
    head.register_forward_hook(lambda module, inputs, output: logits.append(capped(output[0][:, 0].detach(), softcap).numpy()))
    expected = _gradients_here(session, case, architecture, theirs)
    return Alone(logits, expected, run_step(session, plan_case(case)))


def _gradients_here(
    session: Session, case: GradientCase, architecture: Architecture, theirs: Mapping[str, np.ndarray]
) -> Mapping[tuple[str, str], np.ndarray]:
    """Gradients by unit and parameter, made of those that transformers' parameters have."""
    tensors = model_tensors(session.state)
    names = name_weights(tensors, graph=case.graph, architecture=architecture, what="the reference")
    names = as_in_files(names, architecture, found=theirs)
    found = {}
    for tensor in tensors:
        if not all(rows.key in theirs for rows in names.rows[tensor.key]):  # never trained
            continue
        values = np.zeros(tensor.shape)
        flat = values.reshape(tensor.shape[0], -1)
        for rows in names.rows[tensor.key]:
            part = theirs[rows.key].reshape(-1, flat.shape[1])[rows.start : rows.start + rows.num_rows]
            flat[rows.target : rows.target + rows.num_rows] = part
        _, unit, parameter = tensor.key.split(".", 2)
        found[unit, parameter] = values
    return found
