"""Puts the tokens that encoders give a generator in front of the patches of every image that it makes."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron.runtime.step.decision import StepDecision
from multimodal.balance.batch_work import list_items
from multimodal.model.stage_input import PackedInput
from multimodal.values.assignment import Atom, Microbatch, MicrobatchPlace
from multimodal.values.parts.item_passes import list_conditions
from multimodal.values.sample_lengths import SampleLengths


def put_conditions_before(
    packed: PackedInput, images: Microbatch, place: MicrobatchPlace, step: StepDecision, *, lengths: Mapping[int, SampleLengths]
) -> PackedInput:
    """Return a generator's input with the tokens of the items before each image in front of its patches.

    packed: the patches of all images of a microbatch; lengths: of its samples. An item's tokens have positions on a line of their
    own: rows count down from -1, item by item.
    """
    first_row, sources = _rows_handed_over(place, step, lengths)
    rows, positions, is_patch, counts = [], [], [], []
    for image, patches in zip(images, packed.positions.split(packed.lengths), strict=True):
        before = lengths[image.sample_id].items[: image.item_index]
        given = list(list_conditions(step.graph, place.unit, before))
        rows += [first_row[Atom(image.sample_id, index)] + torch.arange(count) for index, count in given]
        rows.append(torch.full((len(patches),), first_row[image]))
        places = [torch.stack((torch.full((count,), -1 - line), torch.arange(count)), 1) for line, (_, count) in enumerate(given)]
        positions += [*places, patches]
        num_given = sum(count for _, count in given)
        is_patch.append(torch.arange(num_given + len(patches)) >= num_given)
        counts.append(num_given + len(patches))
    return replace(
        packed,
        lengths=tuple(counts),
        positions=torch.cat([packed.positions[:0], *positions]),
        condition_rows=torch.cat([torch.arange(0), *rows]),
        item_sources=sources,
        target_rows=torch.cat([torch.zeros(0, dtype=torch.bool), *is_patch]).nonzero()[:, 0],
    )


def _rows_handed_over(
    place: MicrobatchPlace, step: StepDecision, lengths: Mapping[int, SampleLengths]
) -> tuple[dict[Atom, int], Tensor]:
    """Return the first row of every item among the received ones, route by route, and the source unit of each row."""
    graph, first_row, sources = step.graph, dict[Atom, int](), list[int]()
    for route in step.routes.to_target[place]:
        number = graph.upstream(place.unit).index(route.source.unit)
        is_llm = route.source.unit == graph.backbone.name  # one row for each image
        for atom in list_items(route.atoms, unit=place.unit, lengths_by_sample=lengths) if is_llm else route.atoms:
            first_row[atom] = len(sources)
            sources += [number] * (1 if is_llm else lengths[atom.sample_id].items[atom.item_index].num_output_tokens)
    return first_row, torch.tensor(sources, dtype=torch.int64)
