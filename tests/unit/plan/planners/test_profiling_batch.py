from dataclasses import replace

import numpy as np
import pytest

from multimodal.plan.planners.baselines import proportional_gpus
from multimodal.plan.planners.entrain import (
    LARGEST_BATCH,
    NUM_TRIALS,
    gpu_block,
    plan_entrain,
    replica_allocation,
    sample_work,
    stable_batch_size,
)
from multimodal.plan.planners.planning_request import FixedSizes
from tests.unit.plan.planners.planning_cases import TWO, frozen, request, with_memory


def test_the_paper_s_trials():
    assert NUM_TRIALS == 59


def test_varied_samples_need_larger_batches_and_the_batch_is_stable():
    random = np.random.default_rng(3)
    work = {"vision": random.exponential(1.0, 500), "llm": random.exponential(2.2, 500)}
    size = stable_batch_size(work, num_gpus=16, data_parallel_size=1)
    assert 8 < size < LARGEST_BATCH

    def allocation() -> tuple[int, ...]:
        rows = random.integers(0, 500, size)
        means = {unit: float(seconds[rows].mean()) for unit, seconds in work.items()}
        return tuple(proportional_gpus(means, fewest={"vision": 1, "llm": 1}, num_gpus=16).values())

    draws = [allocation() for _ in range(200)]
    most_common = max(set(draws), key=draws.count)
    assert draws.count(most_common) >= 180, "a fresh batch disagrees with probability of at most about p_error"


def test_proportional_gpus_respect_the_fewest_and_use_all():
    assert proportional_gpus({"a": 1.0, "b": 9.0}, fewest={"a": 2, "b": 1}, num_gpus=10) == {"a": 2, "b": 8}
    assert proportional_gpus({"a": 1.0, "b": 1.0, "c": 2.0}, fewest=dict.fromkeys("abc", 1), num_gpus=9) == {
        "a": 2,
        "b": 2,
        "c": 5,
    }


def test_work_per_sample_follows_lengths_and_freezing():
    asked, asked_frozen = request(TWO), request(frozen(TWO, "vision"))
    full, forward_only = sample_work(asked)["vision"], sample_work(asked_frozen)["vision"]
    tokens = asked.loads.of_samples["vision"][:, 0]
    assert full[tokens == 0] == pytest.approx(0.0)
    assert np.corrcoef(tokens, full)[0, 1] > 0.99
    assert (forward_only[tokens > 0] < 0.5 * full[tokens > 0]).all()


@pytest.mark.parametrize("share", [0.1, 0.35, 0.65, 0.9])
def test_gpus_are_handed_out_in_blocks_and_none_is_lost(share):
    found = replica_allocation({"vision": share, "llm": 1 - share}, num_gpus=64, data_parallel_size=4, block=2)
    assert sum(found.values()) == 16
    assert all(count >= 2 and count % 2 == 0 for count in found.values())


def test_fixed_tensor_parallel_sizes_set_the_block():
    assert gpu_block(request()) == 1
    fixed = {"vision": FixedSizes(tensor_parallel_size=2), "llm": FixedSizes(tensor_parallel_size=2)}
    assert gpu_block(request(fixed_sizes=fixed)) == 2
    assert gpu_block(request(fixed_sizes={"llm": FixedSizes(tensor_parallel_size=4)})) == 4


@pytest.mark.parametrize("num_text_tokens", [50, 300, 2000])
def test_entrain_uses_all_gpus_when_tensor_parallelism_is_fixed(num_text_tokens):
    fixed = {unit: FixedSizes(tensor_parallel_size=2, data_parallel_size=1) for unit in ("vision", "llm")}
    samples = tuple(replace(sample, num_text_tokens=num_text_tokens) for sample in request(TWO).lengths)
    run = plan_entrain(request(TWO, fixed_sizes=fixed, lengths=samples))
    assert run.num_gpus == 8


def test_entrain_splits_backwards_and_runs_ahead_where_memory_allows_it():
    asked = request(TWO)
    run = plan_entrain(asked)
    assert (run.schedule, run.passes[-1]) == ("eager-1f1b", "split-backward")
    sizes = {
        unit: FixedSizes(each.tensor_parallel_size, len(each.replicas[0].stages), each.data_parallel_size)
        for unit, each in run.plan.units.items()
    }
    for memory_gb in np.geomspace(asked.cluster.memory_gb, 1e-3, 200):  # the same plan with ever less memory
        tight = plan_entrain(with_memory(request(TWO, fixed_sizes=sizes), memory_gb))
        if tight.schedule == "1f1b":
            break
    assert tight.plan == run.plan and tight.passes == run.passes
