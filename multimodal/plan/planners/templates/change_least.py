"""The smallest change of pipeline sizes after nodes are lost or join: smaller templates, borrowing, and merging."""

from collections.abc import Iterator, Sequence

from multimodal.plan.planners.templates.template_set import TemplateSet


def change_least(templates: TemplateSet, left: Sequence[int], num_joined: int) -> tuple[str, tuple[int, ...]] | None:
    """Return the result of Oobleck's three steps: the last step taken, and the pipelines' numbers of nodes; None if impossible.

    left: the nodes that each pipeline has left. Nodes that joined first fill up pipelines that are too small, then form a
    pipeline of their own if they can, and otherwise enlarge the smallest ones.
    """
    least, most = templates.least_nodes, templates.most_nodes
    sizes = [count for count in left if count]
    steps = {"reinstantiate"}
    while short := sorted(size for size in sizes if size < least):
        size = short[-1]
        sizes.remove(size)
        filled = min(num_joined, least - size)
        num_joined -= filled
        size += filled
        while size < least and max(sizes, default=0) > least:
            sizes[sizes.index(max(sizes))] -= 1
            size += 1
            steps.add("borrow")
        if size < least:
            if not sizes:
                return None
            size += sizes.pop(sizes.index(min(sizes)))
            steps.add("merge")
        sizes.append(size)
    sizes += _own_pipelines(num_joined, least, most)
    extra = num_joined if num_joined < least else 0
    for _ in range(extra):
        if not sizes or min(sizes) >= most:
            return None
        sizes[sizes.index(min(sizes))] += 1
    if max(sizes, default=most + 1) > most or len(sizes) < templates.fewest_replicas:
        return None
    return next(step for step in ("merge", "borrow", "reinstantiate") if step in steps), tuple(sizes)


def _own_pipelines(num_nodes: int, least: int, most: int) -> Iterator[int]:
    """Yield the sizes of the pipelines that joined nodes form; none if they are too few for one."""
    count = num_nodes // least
    while count and num_nodes:
        size = min(most, -(-num_nodes // count))
        yield size
        num_nodes, count = num_nodes - size, count - 1
