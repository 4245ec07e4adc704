"""Encoders on the LLM's ranks with sizes of their own, in orders that durations decide: loss and gradients of one process."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from megatron.runtime.feed.agreement import check_agreement
from megatron.runtime.launch.failure import StopReason
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.values.action import ActionKind
from multimodal.values.errors import AssignmentError
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.schedule import SlotMode
from tests.distributed.dealt_case import IMAGE, ONE_ITEM_EACH, dealt_case, described, source_of, unit_plan
from tests.distributed.gradient_case import GradientCase, plan_case
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.small_run import SIZED_OTHERWISE, losses, write_working_files
from tests.unit.schedule.schedule_text import schedule_to_text
from tools import plan

LINKS = NodeLink(1.0, 60.0), Network(1.0, 100.0, 1)
SLOW, EVEN, FAST = (Cluster(4, tflops, 8.0, *LINKS) for tflops in (1e-6, 1e-4, 100.0))
"""Computations take far longer than messages, about as long, so that encoders run inside the LLM's waits, and far less long."""


def build_case(cluster: Cluster | None, **units: object) -> GradientCase:
    """The LLM has tp 2 and pp 2; on its ranks are four replicas of one encoder, of two layer ranges each, and two of another."""
    ranges = ((0, 2), (2, 4))
    plan = {
        "vision": UnitPlan(tuple(Replica((Stage((rank,), ranges),)) for rank in range(4))),
        "audio": unit_plan(0, dp=2, tp=2),
        "llm": unit_plan(0, tp=2, pp=2),
    }
    described_units = {**described("vision", "audio", **units), **described("llm")}
    return dealt_case(described_units, Plan(plan), shapes=ONE_ITEM_EACH, groups=None, builder="optimus", cluster=cluster)


@pytest.mark.deep(when=lambda cluster, freezing: cluster is not EVEN or bool(freezing))
@pytest.mark.parametrize(("cluster", "freezing"), [(SLOW, {}), (EVEN, {}), (FAST, {}), (EVEN, {"freeze_module": True})])
def test_orders_by_durations_train_as_one_process_does(ranks: RankPool, cluster: Cluster, freezing: dict[str, bool]) -> None:
    assert_matches(build_case(cluster, **freezing), ranks)


@pytest.mark.deep(when=lambda builder: builder == "nested")
@pytest.mark.parametrize("builder", ["optimus-zb", "nested"])
def test_a_plan_with_unequal_shares_trains_as_one_process_does(ranks: RankPool, builder: str) -> None:
    """Four ranks: the LLM has tp 2 and pp 2; of four replicas of the encoder, those of the first stage take one of three."""
    source = source_of(described("vision", "llm"), ONE_ITEM_EACH)
    vision = replace(unit_plan(0, dp=4), microbatch_shares=(1, 1, 2, 2))
    graph, plan = source.graph, Plan({"vision": vision, "llm": unit_plan(0, tp=2, pp=2)})
    lengths = [replace(source.lengths(index), sample_id=index) for index in range(len(source))]
    assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=BalanceOptions())
    assert list(map(len, assignment.units["vision"])) == [1, 1, 2, 2]
    assert_matches(GradientCase(graph, plan, assignment, source, builder=builder, cluster=EVEN), ranks)


def order_of(case: GradientCase) -> str:
    return schedule_to_text(plan_case(case).schedule)


def count_inside(case: GradientCase) -> dict[str, int]:
    """The slots inside computations, by encoder: `vision` has a rank per replica, `audio` two."""
    slots = [slot for lane in plan_case(case).schedule.lanes for slot in lane.slots]
    inside = Counter(slot.action.unit for slot in slots if slot.mode is SlotMode.INSIDE)
    return {name: inside[name] for name in ("vision", "audio")}


def test_segments_run_inside_waits_where_these_are_long(ranks: RankPool) -> None:
    """So the test above holds such schedules against one process, too."""
    slow, even = (ranks.run(count_inside, build_case(each), world_size=4)[0] for each in (SLOW, EVEN))
    assert not any(slow.values()) and all(even.values()) and set(even) == {"audio", "vision"}


def halves_by_unit(case: GradientCase) -> set[str]:
    actions = [action for lane in plan_case(case).schedule.lanes for action in lane.actions]
    return {action.unit for action in actions if action.kind is ActionKind.WEIGHT_GRADIENT}


def test_weight_gradients_of_encoders_on_the_ranks_of_the_llm_fill(ranks: RankPool) -> None:
    """Two stages of the encoder on those of the LLM: the first waits for the second one's input gradients alone.

    An encoder's microbatch has four times the tokens that the LLM gets of it.
    """
    units = {**described("vision", image={**IMAGE, "merge_size": 2}), **described("llm")}
    plan = Plan(dict.fromkeys(units, unit_plan(0, pp=2)))
    case = dealt_case(units, plan, shapes=ONE_ITEM_EACH, groups=None, builder="optimus-zb", cluster=SLOW)
    assert ranks.run(halves_by_unit, case, world_size=2)[0] == {"vision", "llm"}
    assert_matches(case, ranks)


def agree(case: GradientCase, others: Cluster) -> str:
    """Rank 2 goes by the durations of another cluster; returns the message."""
    cluster = others if dist.get_rank() == 2 else case.cluster
    step = plan_case(replace(case, cluster=cluster))
    try:
        check_agreement(step, number=3, wait_seconds=0.0, stop=StopReason.NONE, device=torch.device("cpu"))
    except AssignmentError as problem:
        return str(problem)
    return ""


def test_ranks_that_count_on_other_durations_stop_before_the_step(ranks: RankPool) -> None:
    slow, fast = build_case(SLOW), build_case(FAST)
    orders = {ranks.run(order_of, case, world_size=4)[0] for case in (slow, fast, replace(slow, cluster=None))}
    assert len(orders) > 1
    found = ranks.run(agree, slow, FAST, world_size=4)
    assert all("step 3: ranks ordered the work of the same assignment differently" in each for each in found)
    assert ranks.run(agree, slow, SLOW, world_size=4) == [""] * 4


CLUSTER = {"gpus_per_node": 4, "peak_tflops": 2e-4, "efficiency": 1.0, "dtype": "float64", "memory_gb": 8}
CLUSTER |= {"intra_node": {"bandwidth_gbytes_per_second": 1.0, "latency_us": 3000.0}}
CLUSTER |= {"inter_node": {"bandwidth_gbytes_per_second": 1.0, "latency_us": 60.0, "nics_per_node": 1}}
"""Collectives take about as long as segments of the small run's encoder."""


def test_a_plan_of_the_planner_trains_with_the_losses_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_working_files(tmp_path)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    asked = ["--model", tmp_path / "model.yaml", "--cluster", tmp_path / "cluster.yaml", "--uniform-lengths", "vision=48,llm=32"]
    sizes = ["--num-gpus", 4, "--global-batch-size", 4, "--micro-batch-size", 1, "--vocab-size", 300, "--fix", "llm:tp=2,pp=2"]
    file = tmp_path / "plan.yaml"
    flags = [*asked, *sizes, "--planner", "optimus", "--output", file, "--json"]
    assert plan.main(list(map(str, flags))) == 0, capsys.readouterr().err
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schedule"], answer["transformer_impl"]) == ("optimus", "local")
    assert answer["eff_fine"] > answer["eff_coarse"] and sum(answer["partition"]["vision"]) == 4
    (line,) = (each for each in file.read_text().splitlines() if "pretrain_mllm.py --plan" in each)
    prescribed = line.split("--plan plan.yaml ")[1].split()
    batch = {"--global-batch-size": 4}
    planned = losses(tmp_path, {**batch, **SIZED_OTHERWISE, "--plan": [file, *prescribed]}, num_ranks=4)
    alone = losses(tmp_path, {**batch, "--colocate-units": None}, num_ranks=1)
    assert len(planned) == 2 and planned == pytest.approx(alone, rel=0, abs=1e-9)
