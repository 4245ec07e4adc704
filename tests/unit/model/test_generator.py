"""A generator's layers: every patch starts from its image's condition and its own place, and is compared with its own pixels."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from multimodal.model.initialization import initialize_parameters
from multimodal.model.layers.generator_ends import position_features
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import ModelGraph

pytestmark = pytest.mark.usefixtures("world_of_one")

SHAPE = {"num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 24, "init_method_std": 0.3}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "llm": {"role": "backbone", **SHAPE, "hidden_size": 12},
            "painter": {"role": "generator", "image": {"patch_size": 2, "in_channels": 3}, **SHAPE, "hidden_size": 16},
        }
    }
)
POSITIONS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [0, 0], [0, 1]])
TWO_IMAGES = PackedInput(
    (4, 2), POSITIONS, patches=torch.randn(6, 12, generator=torch.manual_seed(0)), condition_rows=torch.tensor([1] * 4 + [0] * 2)
)
CONDITIONS = torch.randn(2, 12, generator=torch.manual_seed(1), dtype=torch.float64)


def build(unit: str = "painter", *, graph: ModelGraph = GRAPH) -> UnitStage:
    stage = UnitStage(
        graph=graph,
        unit_name=unit,
        layers=range(4),
        groups=ProcessGroupCollection(**dict.fromkeys(("tp", "cp", "pp", "ep", "expt_tp", "tp_ep", "tp_cp"), dist.group.WORLD)),
        options=BuildOptions(Precision(torch.float64)),
        vocab_size=32,
    )
    initialize_parameters(stage, seed=5)
    return stage.train()


def run(batch: PackedInput, conditions: torch.Tensor) -> HeadOutput:
    output = build()(None, batch, conditions)
    assert isinstance(output, HeadOutput)
    return output


def test_each_image_is_made_from_its_own_condition() -> None:
    apart = [
        PackedInput((4,), POSITIONS[:4], patches=TWO_IMAGES.patches[:4], condition_rows=torch.zeros(4, dtype=torch.long)),
        PackedInput((2,), POSITIONS[4:], patches=TWO_IMAGES.patches[4:], condition_rows=torch.zeros(2, dtype=torch.long)),
    ]
    together = run(TWO_IMAGES, CONDITIONS).loss_sum
    torch.testing.assert_close(together, run(apart[0], CONDITIONS[1:]).loss_sum + run(apart[1], CONDITIONS[:1]).loss_sum)


def test_the_loss_is_the_squared_error_of_what_is_predicted() -> None:
    stage = build()
    hidden = torch.randn(6, 1, 16, generator=torch.manual_seed(2), dtype=torch.float64)
    head = stage.layers["3"]
    trained, evaluated = head(hidden, patches=TWO_IMAGES.patches), head.eval()(hidden, patches=TWO_IMAGES.patches)
    assert trained.predicted is None and evaluated.predicted.shape == (6, 12)
    for output in (trained, evaluated):
        torch.testing.assert_close(output.loss_sum, ((evaluated.predicted - TWO_IMAGES.patches) ** 2).sum())
        assert output.is_correct is None and output.conditions is None


def test_patches_of_one_image_differ_by_their_place_alone() -> None:
    projector = build().layers["0"]
    hidden = projector(CONDITIONS, torch.tensor([0, 0, 0]), torch.tensor([[2, 3], [2, 3], [3, 2]]))[:, 0]
    torch.testing.assert_close(hidden[0], hidden[1])
    assert not torch.allclose(hidden[0], hidden[2])


def test_an_image_is_made_beside_what_encoders_give() -> None:
    """With tokens before its patches, of which only the patches are compared, and each of which changes what is made."""
    edges = [["vision", "llm"], ["llm", "painter"], ["vision", "painter"]]
    vision = {"role": "encoder", **SHAPE, "hidden_size": 8}
    units = {"vision": vision, **GRAPH.to_dict()["units"]}
    stage = build(graph=ModelGraph.from_dict({"units": units, "edges": edges}))
    beside = torch.tensor([[-1, 0], [-1, 1]])
    batch = PackedInput(
        (6,),
        torch.cat((beside, POSITIONS[:4])),
        patches=TWO_IMAGES.patches[:4],
        condition_rows=torch.tensor([1, 2, 0, 0, 0, 0]),
        item_sources=torch.tensor([0, 1, 1]),
        target_rows=torch.arange(2, 6),
    )
    given = torch.randn(3, 20, generator=torch.manual_seed(3), dtype=torch.float64, requires_grad=True)
    made = stage.eval()(None, batch, given)
    assert made.predicted.shape == (4, 12)
    torch.testing.assert_close(made.loss_sum, ((made.predicted - TWO_IMAGES.patches[:4]) ** 2).sum())
    made.loss_sum.backward()
    assert given.grad[:, :12].abs().sum(1).gt(0).all() and given.grad[:, 12:].eq(0).all(), "the rest is for the LLM's layers"
    projector = stage.layers["0"]
    assert projector.encoders["vision_tokens"].weight.grad.abs().sum() > 0 and projector.weight.grad.abs().sum() > 0


def test_the_llm_hands_on_the_states_of_the_rows_asked_for() -> None:
    """And their gradient reaches the LLM beside that of its own loss."""
    stage = build("llm")
    batch = PackedInput(
        (5,),
        torch.arange(5),
        token_ids=torch.arange(5),
        target_rows=torch.tensor([0]),
        targets=torch.tensor([3]),
        generator_rows=torch.tensor([4, 2]),
    )
    output = stage(None, batch)
    assert output.conditions.shape == (2, 12)
    output.conditions.sum().backward()
    gradient = stage.layers["0"].word_embeddings.weight.grad
    assert gradient[:5].abs().sum(1).gt(0).all(), "causal attention lets the last row see all tokens"


def test_position_features_tell_places_apart() -> None:
    grid = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    features = position_features(grid, hidden_size=18, base=100.0, dtype=torch.float64)
    assert features.shape == (36, 18) and features[:, 16:].eq(0).all()
    distances = torch.cdist(features, features) + 10 * torch.eye(36, dtype=torch.float64)
    assert float(distances.min()) > 0.1
    torch.testing.assert_close(features[0], torch.tensor([0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [1.0] * 4 + [0.0] * 2).double())
