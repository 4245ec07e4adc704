"""OrchMLLM: MLLM-10B, 18B and 84B under ZeRO-3 on H100; mini-batches of 80, 60 and 30 samples balanced, of 65, 40 and 15 not.

What the paper states: sizes, image sizes, mini-batches (balanced, a larger one fits the memory), a ZeRO-3 group of 256 GPUs
(2,560 in all; the groups are alike, and one is computed), and its data: LLaVA-1.5's instructions, Librispeech, AIR-Bench. Here
samples are LLaVA's descriptions of images or Librispeech's transcribed speech, drawn with equal probability, so that a sample has
images or audio, as its "modality composition incoherence" describes. `h100.yaml` is used as it is.

Under ZeRO-3 all ranks meet in every layer's gathering, so each unit's forward and each unit's backward takes as long as the
busiest rank computes; the gathering itself is taken to be hidden, as the paper's is. Audio is padded to the longest clip of its
mini-batch, images and texts are packed, as in the paper; the balanced run balances padded audio.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.published_setups.length_files import read_lengths
from benchmarks.published_setups.planned import read_cluster, read_model
from benchmarks.published_setups.rows import Row, single
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.plan.plans_of_sizes import plan_colocated
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths

GROUP_SIZE = 256
MINI_BATCHES: Mapping[str, Mapping[str, int]] = {
    "84b": {"none": 15, "orchmllm": 30},
    "18b": {"none": 40, "orchmllm": 60},
    "10b": {"none": 65, "orchmllm": 80},
}
"""Model -> balancer -> samples of a replica."""
DATA = ("coco_llava_descriptions", "librispeech_dev_test_clean")
GAINS = (1.4, 1.9)


def rows(folder: Path) -> Iterator[Row]:
    """Say how many more samples a second balancing gives."""
    cluster = read_cluster("h100")
    gains = {}
    for name, sizes in MINI_BATCHES.items():
        per_sample = {each: OrchmllmStep(name, size, folder).seconds(each, cluster) / size for each, size in sizes.items()}
        gains[name] = per_sample["none"] / per_sample["orchmllm"]
    for name, gain in gains.items():
        yield Row("OrchMLLM", f"{name.upper()}, balanced over not", GAINS, gain, "evaluation")
    yield Row("OrchMLLM", "largest of these", single(GAINS[1]), max(gains.values()), "evaluation")


class OrchmllmStep:
    """One step of one model, drawn once."""

    def __init__(self, name: str, mini_batch_size: int, folder: Path) -> None:
        self.graph = read_model(f"orchmllm-{name}")
        self.plan = plan_colocated(self.graph, sizes={}, world_size=GROUP_SIZE)
        self.lengths = mixed_samples(self.graph, folder, count=GROUP_SIZE * mini_batch_size)
        self.options = BalanceOptions(
            num_microbatches=1,
            vocab_size=self.graph.backbone.vocab_size or 152064,
            unit_costs={"audio": LengthCost(CostForm.PADDED)},
        )
        self.assignments: dict[str, Assignment] = {}

    def costs(self, balance: str, cluster: Cluster) -> ModelCosts:
        """Return the costs of a balancer's placement."""
        if balance not in self.assignments:
            placed = BALANCERS[balance](self.lengths, graph=self.graph, plan=self.plan, options=self.options)
            self.assignments[balance] = placed
        return ModelCosts(
            self.assignments[balance].shape(self.graph, self.plan),
            self.assignments[balance],
            pad_items(self.lengths, self.assignments[balance], unit="audio"),
            cluster,
            self.options.vocab_size,
        )

    def seconds(self, balance: str, cluster: Cluster) -> float:
        """Every unit's forward and backward at the pace of its busiest rank."""
        costs = self.costs(balance, cluster)
        return sum(
            max(
                sum(costs.compute(Action(kind, unit, replica, 0, index)).seconds for index in range(len(microbatches)))
                for replica, microbatches in enumerate(replicas)
            )
            for unit, replicas in self.assignments[balance].units.items()
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        )


def pad_items(lengths: Sequence[SampleLengths], assignment: Assignment, *, unit: str) -> tuple[SampleLengths, ...]:
    """Lengthen a unit's items to the longest of their microbatch; what leaves the encoder stays as it is."""
    by_sample = {sample.sample_id: sample for sample in lengths}
    for microbatch in (microbatch for replica in assignment.units[unit] for microbatch in replica):
        longest = max(by_sample[atom.sample_id].items[atom.item_index].num_tokens for atom in microbatch)
        for atom in microbatch:
            items = list(by_sample[atom.sample_id].items)
            items[atom.item_index] = items[atom.item_index]._replace(num_tokens=longest)
            by_sample[atom.sample_id] = replace(by_sample[atom.sample_id], items=tuple(items))
    return tuple(by_sample.values())


def mixed_samples(graph: ModelGraph, folder: Path, *, count: int, seed: int = 0) -> tuple[SampleLengths, ...]:
    """Draw samples from both data sets with equal probability; images where the file has images, audio where it has speech."""
    draw = np.random.default_rng(seed)
    pools: list[Sequence[SampleLengths]] = [read_lengths(folder, name, graph=graph) for name in DATA]
    chosen = draw.integers(0, len(pools), count).tolist()
    return tuple(
        replace(pools[pool][int(draw.integers(0, len(pools[pool])))], sample_id=index) for index, pool in enumerate(chosen)
    )
