"""A tiny model of transformers under plans here: its logits and gradients under the names that they have here, and its files."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from safetensors.torch import load_file

from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.hugging_face.load_weights import load_hugging_face
from megatron.runtime.hugging_face.named_weights import as_in_files, name_weights
from megatron.runtime.hugging_face.save_weights import save_hugging_face
from megatron.runtime.hugging_face.unit_weights import load_units
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import model_tensors
from megatron.runtime.training.trainer import build_scheduler
from multimodal.attention.block_attention import capped
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.layers.registry import read_model
from multimodal.data.sample_source import SampleSource, SampleText
from multimodal.hugging_face.architecture import Architecture
from multimodal.hugging_face.registry import read_config
from multimodal.values.model_graph import ModelGraph
from tests.distributed.gradient_case import GradientCase, RankGradients, build_session, plan_case, run_step
from tests.distributed.gradient_comparison import TOLERANCE, assert_matches, compare
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import build_plan
from tests.distributed.wide_transformers import build_wide_model, double_precision, gradients_by_key

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
    return Alone(logits, _gradients_here(session, case, architecture, theirs), run_step(session, plan_case(case)))


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


VOCABULARY, MULTIPLE = 61, 64
ONE_STEP: dict[str, object] = {"--lr": RATE, "--weight-decay": DECAY, "--adam-beta1": BETAS[0], "--adam-beta2": BETAS[1]}
ONE_STEP |= {"--clip-grad": 0, "--dtype": "float64", "--global-batch-size": 4, "--train-iters": 1, "--split": "100"}
ONE_STEP |= {"--tokenizer-type": "ByteTokenizer", "--num-workers": 0}
"""Flags of a run that does what `step_in_torch` does."""
NUM_TEXT_TOKENS = 54
"""Ids that are drawn; those from here on stand for items."""
Plans = Mapping[str, tuple[dict[str, Any], dict[str, Any]]]
"""Name -> sizes of `build_plan`, options of a GradientCase."""
Inputs = Callable[[Any, int, torch.Tensor], Mapping[str, Any]]
"""From a source, a sample and its token ids, to change in place, to what else a model of transformers is called with."""


def run_and_save(case: GradientCase, target: str = "") -> RankGradients:
    """Run a case whose units come from folders, on a rank, and write its folder, if there is a target."""
    session = build_session(case)
    load_units(session)
    if target:
        save_hugging_face(Path(target), session=session)
    return run_step(session, plan_case(case))


def only_text(source: SampleSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Comparison:
    folder: Path
    graph: ModelGraph
    shapes: tuple[SampleShape, ...]
    marks: Marks
    expected: RankGradients

    stepped: Path | None = None
    """The folder of transformers' model after a step of AdamW."""

    def case(self, sizes: Mapping[str, Any], *, graph: ModelGraph | None = None, **options: Any) -> GradientCase:
        return case_of(graph or self.graph, self.shapes, sizes, marks=self.marks, **options)

    def assert_under_plans(self, plans: Plans, ranks: RankPool) -> None:
        """The same loss and gradients, files that are the same byte for byte, and the same weights after a step."""
        for name, (sizes, options) in plans.items():
            target = self.folder.parent / name
            stepped = None if self.stepped is None else self.folder.parent / f"{name}, stepped"
            run = FromFolder(self.folder, target, stepped)
            assert_matches(self.case(sizes, **options), ranks, run=run, expected=self.expected)
            self.assert_same_files(target)
            if self.stepped is not None and stepped is not None:
                assert_same_step(weights_of(self.folder), weights_of(stepped), weights_of(self.stepped))

    def assert_same_files(self, target: Path) -> None:
        for path in self.folder.glob("*.safetensors"):
            assert (target / path.name).read_bytes() == path.read_bytes(), f"{path.name} in {target.name}"


def compare_logits(
    make: Callable[[], Any],
    folder: Path,
    ranks: RankPool,
    *,
    shapes: tuple[SampleShape, ...],
    inputs: Inputs = only_text,
    marks: Marks = (),
) -> Comparison:
    """Build a model and hold the logits of all target tokens and all gradients against Braid's in one process, within 1e-12.

    What Braid writes without a folder to follow, transformers load as the same model.
    """
    model = build_wide_model(make, folder, max_shard_size="10KB")
    graph = read_model(folder)
    sizes: dict[str, Any] = {unit.name: (1, 1, 1) for unit in graph.units}
    sizes["colocated"] = len(graph.units) > 1
    alone = case_of(graph, shapes, sizes, marks=marks)
    assert isinstance(alone.source, PaddedSource)
    logits, loss_sum = run_transformers(model, alone.source, inputs)
    own, like, stepped = (folder.parent / name for name in ("written alone", "alone", "stepped in torch"))
    (here,) = ranks.run(run_alone, FromFolder(folder, like), alone, own, gradients_by_key(model), world_size=1)
    for mine, theirs in zip(here.logits, logits, strict=True):
        assert np.abs(mine[:, :VOCABULARY] - theirs).max() < 1e-12
    expected = RankGradients({"llm": loss_sum}, here.expected, {})
    compare(alone, [here.found], expected=expected, tolerance=1e-12)
    update_in_torch(model, rate=RATE, decay=DECAY, betas=BETAS)
    model.save_pretrained(stepped)
    comparison = Comparison(folder, graph, shapes, marks, expected, stepped)
    comparison.assert_same_files(like)
    assert_loads(own, model, alone.source, inputs, expected=logits)
    return comparison


def assert_same_step(
    before: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
    """The same weights, of which the same ones are as they were before the step."""
    assert before.keys() == mine.keys() == theirs.keys()
    for key, expected in theirs.items():
        assert (mine[key] - expected).abs().max() < TOLERANCE, key
    unchanged = {key for key, value in before.items() if torch.equal(mine[key], value)}
    assert unchanged == {key for key, value in before.items() if torch.equal(theirs[key], value)}
    assert len(unchanged) < len(before)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


def assert_loads(folder: Path, like: Any, source: PaddedSource, inputs: Inputs, *, expected: list[np.ndarray]) -> None:
    """Transformers loads a folder as the model that it is named, finds all weights and no others, and computes the same."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    experts = getattr(like.config, "_experts_implementation", None)  # the default for experts has no float64
    options = {} if experts is None else {"experts_implementation": experts}
    options["attn_implementation"] = like.config._attn_implementation
    with double_precision():
        model, info = getattr(transformers, name).from_pretrained(
            folder, dtype=torch.float64, output_loading_info=True, **options
        )
    assert not any(info.values()), info
    logits, _ = run_transformers(model.train(), source, inputs)
    for mine, theirs in zip(logits, expected, strict=True):
        assert np.abs(mine - theirs).max() < 1e-12


def case_of(
    graph: ModelGraph, shapes: tuple[SampleShape, ...], sizes: Mapping[str, Any], *, marks: Marks = (), **options: Any
) -> GradientCase:
    plan, vocab_size = build_plan(graph, **sizes), graph.backbone.vocab_size or 0
    padded = -(-vocab_size // MULTIPLE) * MULTIPLE
    source = PaddedSource(graph, shapes, padded, num_between=2 if marks else 1, num_tokens=NUM_TEXT_TOKENS, marks=marks)
    lengths = [source.lengths(index) for index in range(len(source))]
    assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=1))
    return GradientCase(graph, plan, assignment, source, **options)


def step_in_torch(
    model: Any, source: SampleSource, *, inputs: Inputs = only_text, rate: float, decay: float, betas: tuple[float, float]
) -> float:
    """One AdamW step of transformers' model on all samples of a source; returns the loss."""
    _, loss_sum = run_transformers(model, source, inputs)
    update_in_torch(model, rate=rate, decay=decay, betas=betas)
    return loss_sum / sum(int(source.text(index).is_target.sum()) for index in range(len(source)))


def update_in_torch(model: Any, *, rate: float, decay: float, betas: tuple[float, float]) -> None:
    """Update a model by the gradients that it has; vectors (norms, biases) but class tokens do not decay, as in Megatron."""
    groups = [{"params": list[torch.Tensor](), "weight_decay": 0.0}, {"params": list[torch.Tensor](), "weight_decay": decay}]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            decays = parameter.squeeze().dim() > 1 or name.endswith(("class_embedding", "cls_token"))
            groups[decays]["params"].append(parameter)
    torch.optim.AdamW(groups, lr=rate, betas=betas, eps=1e-8).step()


def run_transformers(model: Any, source: Any, inputs: Inputs) -> tuple[list[np.ndarray], float]:
    """Logits of the targets, sample by sample, and the loss; gradients are left in the model."""
    divisor = sum(int(source.text(index).is_target.sum()) for index in range(len(source)))
    logits, loss_sum = [], 0.0
    with double_precision():
        for index in range(len(source)):
            text = source.text(index)
            token_ids = torch.from_numpy(text.token_ids.copy())
            given = inputs(source, index, token_ids)
            rows = torch.from_numpy(text.is_target).nonzero()[:, 0]
            found = model(input_ids=token_ids[None], **given).logits[0, rows]
            loss = torch.nn.functional.cross_entropy(found, torch.from_numpy(text.labels)[rows], reduction="sum")
            (loss / divisor).backward()
            logits.append(found.detach().numpy())
            loss_sum += float(loss.detach())
    return logits, loss_sum
