"""The table of all kinds of mutations, and draws from it."""

import random
from collections.abc import Collection

from tests.distributed.mutations.checkpoints import checkpoint_mutations
from tests.distributed.mutations.connections import connection_mutations
from tests.distributed.mutations.data import chat_mutations, image_mutations, manifest_mutations, sound_mutations
from tests.distributed.mutations.files import document_mutations, graph_mutations, place_mutations, text_mutations, write_model
from tests.distributed.mutations.flags import flag_mutations
from tests.distributed.mutations.folders import folder_mutations
from tests.distributed.mutations.mutation import CLUSTER, CONFIG, PLAN, Mutation
from tests.distributed.mutations.one_rank import rank_mutations
from tests.distributed.small_run import MODEL


def list_mutations() -> tuple[Mutation, ...]:
    """Returns every kind of mutation, in a fixed order."""
    found = (
        *flag_mutations(),
        *document_mutations("model", MODEL, write_model),
        *document_mutations("plan", PLAN, lambda inputs, plan: inputs.write_plan(plan)),
        *document_mutations("cluster", CLUSTER, lambda inputs, cluster: inputs.write_cluster(cluster)),
        *document_mutations("config", CONFIG, lambda inputs, config: inputs.write_config(config)),
        *text_mutations("config", lambda inputs: inputs.write_config(CONFIG)),
        *place_mutations("config", lambda inputs: inputs.write_config(CONFIG), file="config.yaml"),
        *place_mutations("model", lambda inputs: inputs.folder / "model.yaml", file="model.yaml"),
        *place_mutations("plan", lambda inputs: inputs.write_plan(PLAN), file="plan.yaml"),
        *place_mutations("cluster", lambda inputs: inputs.write_cluster(CLUSTER), file="cluster.yaml"),
        *place_mutations("manifest", lambda inputs: inputs.manifest, file="manifest.jsonl"),
        *text_mutations("model", lambda inputs: inputs.folder / "model.yaml"),
        *text_mutations("plan", lambda inputs: inputs.write_plan(PLAN)),
        *text_mutations("cluster", lambda inputs: inputs.write_cluster(CLUSTER)),
        *text_mutations("manifest", lambda inputs: inputs.manifest),
        *graph_mutations(),
        *manifest_mutations(),
        *chat_mutations(),
        *image_mutations(),
        *sound_mutations(),
        *checkpoint_mutations(),
        *folder_mutations(),
        *connection_mutations(),
        *rank_mutations(),
    )
    assert len({mutation.name for mutation in found}) == len(found)
    return found


def draw_mutations(number: int, *, seed: int, areas: Collection[str] | None = None) -> tuple[Mutation, ...]:
    """Returns at most `number` different kinds of some areas (None: of all), drawn so that every area has its share."""
    generator = random.Random(seed)
    by_area: dict[str, list[Mutation]] = {}
    for mutation in list_mutations():
        if areas is None or mutation.area in areas:
            by_area.setdefault(mutation.area, []).append(mutation)
    for area in by_area.values():
        generator.shuffle(area)
    drawn: list[Mutation] = []
    while len(drawn) < number and any(by_area.values()):
        drawn += [area.pop() for area in by_area.values() if area]
    return tuple(drawn[:number])
