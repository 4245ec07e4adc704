"""The warning about global batches whose proportions of work are not stable."""

from pathlib import Path

import pytest
import yaml

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.training.prediction import describe_small_batch
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

SHAPE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
UNITS = {
    "vision": {"role": "encoder", **SHAPE, "image": {"patch_size": 14, "merge_size": 2}},
    "llm": {"role": "backbone", **SHAPE},
}


class Samples:
    """Every eighth sample has a large image, or all have the same."""

    def __init__(self, *, is_skewed: bool) -> None:
        self.is_skewed = is_skewed

    def __len__(self) -> int:
        return 64

    def lengths(self, index: int) -> SampleLengths:
        has_image = not self.is_skewed or index % 8 == 0
        return SampleLengths(index, (ItemLengths("vision", 4096, 1024),) if has_image else (), 700, 700)


def warning_of(tmp_path: Path, line: str, *, is_skewed: bool = True) -> str | None:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": UNITS}, sort_keys=False))
    flags = f"--model {tmp_path}/model.yaml --data-path digits --lr 1e-3 --train-iters 1 {line}"
    config = parse_arguments(flags.split(), environ={"WORLD_SIZE": "8"})
    graph = ModelGraph.from_file(config.model.model)
    plan = plan_disaggregated(graph, sizes=config.parallelism.units, world_size=8)
    return describe_small_batch(config, Samples(is_skewed=is_skewed), graph=graph, plan=plan)  # type: ignore[arg-type]


def test_a_batch_below_b_min_is_named_with_the_number(tmp_path: Path) -> None:
    found = warning_of(tmp_path, "--vision-dp 4 --llm-pp 4 --global-batch-size 8")
    assert found is not None and found.startswith(
        "warning: the units' shares of the work differ from one global batch of 8 samples"
    )
    number = int(found.partition("it takes ")[2].split()[0])
    assert number > 8
    assert warning_of(tmp_path, f"--vision-dp 4 --llm-pp 4 --global-batch-size {number}") is None


@pytest.mark.parametrize(
    ("line", "is_skewed"),
    [
        ("--vision-dp 4 --llm-pp 4 --global-batch-size 8", False),
        ("--vision-dp 4 --llm-dp 4 --global-batch-size 8", True),
        ("--vision-dp 4 --llm-pp 4 --global-batch-size 8 --lengths-from decode", True),
    ],
)
def test_nothing_is_said_where_there_is_nothing_to_choose(tmp_path: Path, line: str, is_skewed: bool) -> None:
    """All samples alike; one rank for each unit of a replica; lengths that only decoding tells."""
    assert warning_of(tmp_path, line, is_skewed=is_skewed) is None
