import random
from itertools import combinations_with_replacement

import pytest

from multimodal.plan.planners.templates.instantiate import instantiate, share_batch
from multimodal.plan.planners.templates.template_set import PipelineTimes
from multimodal.values.errors import PlanError


def random_templates(draw, *, least):
    """Pipelines of consecutive numbers of nodes: more nodes are faster, not always in proportion."""
    found = {}
    for nodes in range(least, least + draw.randint(1, 4)):
        stages = [draw.uniform(0.5, 1.0) / nodes for _ in range(nodes)]
        found[nodes] = PipelineTimes(tuple(stages), tuple(2 * each for each in stages))
    return found


def least_step(times, sizes, count):
    """Try every share of the batch."""

    def steps(left, rest):
        if len(rest) == 1:
            yield times[rest[0]].seconds(left)
            return
        for own in range(1, left - len(rest) + 2):
            yield from (max(times[rest[0]].seconds(own), other) for other in steps(left - own, rest[1:]))

    return min(steps(count, sizes))


def test_shares_are_the_best_of_all():
    draw = random.Random(0)
    for _ in range(40):
        times = random_templates(draw, least=1)
        sizes = [draw.choice(list(times)) for _ in range(draw.randint(1, 4))]
        count = draw.randint(len(sizes), 12)
        found = share_batch(times, sizes, num_microbatches=count)
        assert found.step_seconds == pytest.approx(least_step(times, sizes, count))
        assert sum(each.num_microbatches for each in found.instances) == count
        assert sorted(each.nodes for each in found.instances) == sorted(sizes)
        assert min(each.num_microbatches for each in found.instances) >= 1


def test_instances_are_the_best_of_all_combinations():
    draw = random.Random(1)
    for _ in range(40):
        times = random_templates(draw, least=draw.randint(1, 2))
        num_nodes, num_microbatches, least_replicas = draw.randint(3, 8), draw.randint(3, 12), draw.randint(1, 2)
        combinations = [
            sizes
            for count in range(least_replicas, num_microbatches + 1)
            for sizes in combinations_with_replacement(times, count)
            if sum(sizes) == num_nodes
        ]
        if not combinations:
            with pytest.raises(PlanError):
                instantiate(times, num_nodes, num_microbatches, least_replicas)
            continue
        wanted = min(share_batch(times, sizes, num_microbatches=num_microbatches).step_seconds for sizes in combinations)
        found = instantiate(times, num_nodes, num_microbatches, least_replicas)
        assert found.step_seconds == pytest.approx(wanted)
        assert sum(each.nodes for each in found.instances) == num_nodes
        assert len(found.instances) >= least_replicas


def test_what_cannot_be_is_refused_with_what_would_work():
    times = {2: PipelineTimes((1.0, 1.0), (2.0, 2.0))}
    with pytest.raises(PlanError, match="3 nodes cannot hold 2 replicas of at least 2 nodes each; use 4 nodes"):
        instantiate(times, 3, 8, 2)
    with pytest.raises(PlanError, match="1 microbatches cannot be shared by 2 replicas; make it at least 2"):
        instantiate(times, 4, 1, 2)
    with pytest.raises(PlanError, match="5 nodes cannot all be used by at most 8 replicas"):
        instantiate(times, 5, 8)
    with pytest.raises(PlanError, match="make it at least 3 microbatches"):
        share_batch(times, [2, 2, 2], num_microbatches=2)
