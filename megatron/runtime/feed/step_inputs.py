"""Loads this rank's part of a global batch: packed inputs for the microbatches of its own stages only."""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate

import torch

from megatron.runtime.feed.packing import pack_encoder_microbatch, pack_language_microbatch
from megatron.runtime.step.decision import StepDecision
from megatron.runtime.step.step import Step
from megatron.runtime.step.token_placement import WHOLE
from multimodal.attention.packed_lengths import ItemSpan
from multimodal.balance.batch_work import list_items
from multimodal.data.index.item_reader import expect_items
from multimodal.data.sample_source import SampleSource
from multimodal.model.latents import ItemsMade, draw_path
from multimodal.model.layers.layer_kind import InputContext
from multimodal.model.layers.projectors import drops_tokens
from multimodal.model.layers.registry import LAYER_KINDS
from multimodal.model.stage_input import PackedInput, find_row_ends, pack_lengths, share_input
from multimodal.model.transformer_config import BuildOptions
from multimodal.values.assignment import Assignment, Atom, Microbatch, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths, condition_tokens, first_joined_token, list_conditions
from multimodal.values.shape import StepShape


def load_inputs(
    source: SampleSource, step: Step, *, rank: int, options: BuildOptions | None = None, seed: int = 0
) -> tuple[dict[MicrobatchPlace, tuple[PackedInput, ...]], dict[MicrobatchPlace, tuple[int, ...]]]:
    """Load and pack every microbatch that passes through this rank, with pixels only if they are needed (`item_ranks`).

    Returns `Step.inputs` and `Step.target_samples`, on the CPU; what runs in sample subsets is packed subset by subset, and of
    tokens spread over ranks (`Step.placement`) each keeps its own. source: has samples by their ids; options: of the stages, for
    which masks and the like are prepared; None: stages derive them. seed: of the noise from which generators learn. Raises
    DataError if an item cannot be decoded, or a sample's lengths do not say where its items begin.
    """

    def own(packed: PackedInput, place: MicrobatchPlace, part: int = WHOLE) -> PackedInput:
        unit_plan, unit = step.plan.units[place.unit], step.graph.unit(place.unit)
        context_rank = unit_plan.context_parallel_rank(rank)
        share = step.placement.own_share(place, part=part, rank=context_rank)
        found = packed if share is None else share_input(packed, share)
        found = found.with_windows_of(unit)
        if options is None:
            return found
        stage = next(each for each in unit_plan.replicas[place.replica].stages if rank in each.ranks)
        sizes = unit_plan.tensor_size(stage), unit_plan.context_parallel_size
        return _prepare(found, InputContext(step.graph, unit, options, *sizes))

    needed = needed_pieces(step.shape, step.assignment, step.lengths, ranks=(rank,))[rank]
    expect_items(source, [piece for piece in needed if piece.item_index >= 0])
    inputs: dict[MicrobatchPlace, tuple[PackedInput, ...]] = {}
    target_samples: dict[MicrobatchPlace, tuple[int, ...]] = {}
    for place in step.places_of(rank):
        unit = step.graph.unit(place.unit)
        has_items = rank in item_ranks(step.graph, step.plan, place.unit, place.replica)
        if unit.join is not None:
            inputs[place] = (own(_joined_input(unit, place, step), place),)
        elif unit.role is Role.ENCODER:
            subsets = step.subsets(place)
            pack = partial(pack_encoder_microbatch, source=source, item_input=unit.item_input, with_pixels=has_items)
            inputs[place] = tuple(
                own(pack(atoms), place, part)
                for part, atoms in (enumerate(subsets) if place in step.cuts.num_subsets else ((WHOLE, subsets[0]),))
            )
        elif unit.role is Role.GENERATOR:
            whole = _generator_input(source, unit, place, step, with_pixels=has_items, seed=seed)
            inputs[place] = (own(whole, place),)
        else:
            step.placement.check_starts(place, source=source)
            whole, samples = _language_input(source, place, step)
            inputs[place] = (held := own(whole, place),)
            target_samples[place] = _held(samples, whole, held)
    return inputs, target_samples


def _prepare(batch: PackedInput, context: InputContext) -> PackedInput:
    """Return a microbatch's input, on the CPU, with everything that layers derive from its lengths: masks, work lists, rows."""
    unit = context.unit
    if drops_tokens(unit):
        batch = batch.with_kept_rows()
    if unit.image is not None and unit.image.has_row_ends:
        batch = dataclasses.replace(batch, kept_rows=find_row_ends(batch.positions))
    packed = pack_lengths(batch, context.num_padded_rows(batch.num_tokens))
    for name in dict.fromkeys(unit.layers):
        if name in LAYER_KINDS:
            LAYER_KINDS[name].prepare(packed, context)
    return dataclasses.replace(batch, packed=packed)


def item_ranks(graph: ModelGraph, plan: Plan, unit: str, replica: int) -> tuple[int, ...]:
    """Return the ranks that need a replica's pixels or sound: an encoder's first stage, a generator's last (for noise, first)."""
    described = graph.unit(unit)
    if described.role is Role.BACKBONE or described.join is not None:
        return ()
    stages = plan.units[unit].replicas[replica].virtual_stages
    if described.role is Role.ENCODER:
        return stages[0].ranks
    return tuple(dict.fromkeys((*(stages[0].ranks if described.flow is not None else ()), *stages[-1].ranks)))


def needed_pieces(
    shape: StepShape, assignment: Assignment, lengths: Mapping[int, SampleLengths], *, ranks: Iterable[int]
) -> dict[int, list[Atom]]:
    """Return each rank's texts (of whole samples, for the LLM) and items to decode, in the order of its microbatches."""
    found: dict[int, dict[Atom, None]] = {rank: {} for rank in ranks}
    for name, unit in shape.plan.units.items():
        role = shape.graph.unit(name).role
        for index, replica in enumerate(unit.replicas):
            needing = replica.ranks if role is Role.BACKBONE else item_ranks(shape.graph, shape.plan, name, index)
            here = [rank for rank in needing if rank in found]
            for microbatch in range(assignment.num_microbatches(name, index) if here else 0):
                atoms = assignment.atoms(MicrobatchPlace(name, index, microbatch))
                pieces = list_items(atoms, unit=name, lengths_by_sample=lengths) if role is Role.GENERATOR else atoms
                for rank in here:
                    found[rank].update(dict.fromkeys(pieces))
    return {rank: list(pieces) for rank, pieces in found.items()}


def _held(samples: tuple[int, ...], whole: PackedInput, own: PackedInput) -> tuple[int, ...]:
    """Return the samples of the targets that this rank holds."""
    if own.share is None or whole.target_rows is None:
        return samples
    is_held = own.share.local_rows(whole.target_rows.numpy())[0].tolist()
    return tuple(sample for sample, held in zip(samples, is_held, strict=True) if held)


def _joined_input(unit: Unit, place: MicrobatchPlace, step: StepDecision) -> PackedInput:
    """Make every item a sequence of the outputs of other encoders, whose places are counted from its first token."""
    atoms, graph = step.assignment.atoms(place), step.graph
    items = {atom: step.lengths[atom.sample_id].items[atom.item_index] for atom in atoms}
    lengths = tuple(item.inside(unit.name).num_tokens for item in items.values())
    first_token = dict(zip(atoms, accumulate(lengths, initial=0), strict=False))
    rows, sources = [torch.arange(0)], [torch.arange(0)]
    for name, atom in ((route.source.unit, atom) for route in step.routes.to_target[place] for atom in route.atoms):
        start = first_token[atom] + first_joined_token(graph, unit.name, items[atom], source=name)
        rows.append(start + torch.arange(items[atom].inside(name).num_output_tokens))
        sources.append(torch.full_like(rows[-1], graph.upstream(unit.name).index(name)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return PackedInput(lengths, positions, item_rows=torch.cat(rows), item_sources=torch.cat(sources))


def _generator_input(
    source: SampleSource, unit: Unit, place: MicrobatchPlace, step: StepDecision, *, with_pixels: bool, seed: int
) -> PackedInput:
    """Make every image of the microbatch's samples a sequence; the LLM hands over rows for each, by route."""
    items_of = partial(list_items, unit=unit.name, lengths_by_sample=step.lengths)
    items = items_of(step.assignment.atoms(place))
    packed = pack_encoder_microbatch(items, source=source, item_input=unit.item_input, with_pixels=with_pixels)
    assert unit.image is not None
    num_patches, num_values = packed.lengths, None if packed.patches is None else unit.image.num_patch_values
    is_encoded = packed.patches is not None and packed.patches.dtype == torch.uint8 and unit.image.latents is not None
    is_whole = unit.module is not None or (unit.flow is not None and unit.flow.form is not None)
    if packed.patches is not None and (is_encoded or is_whole):
        grids = tuple(source.item_grid(*item)[:2] for item in items)
        made = ItemsMade(grids, packed.positions, torch.arange(len(packed.patches)), is_encoded)
        packed = dataclasses.replace(packed, items_made=made)
    if step.graph.takes_tokens(unit.name):
        packed = _put_conditions_before(packed, items, place, step)
    else:
        handed_over = [item for route in step.routes.to_target[place] for item in items_of(route.atoms)]
        row_of_item = {item: row for row, item in enumerate(handed_over)}
        rows = torch.tensor([row_of_item[item] for item in items])
        packed = dataclasses.replace(packed, condition_rows=torch.repeat_interleave(rows, torch.tensor(packed.lengths)))
    if unit.flow is None:
        return packed
    path = draw_path(items, unit.flow, num_tokens=packed.lengths, num_patches=num_patches, num_values=num_values, seed=seed)
    return dataclasses.replace(packed, path=path)


def _put_conditions_before(packed: PackedInput, images: Microbatch, place: MicrobatchPlace, step: StepDecision) -> PackedInput:
    """Return a generator's input, patches of all its images, with the tokens of the items before each image in front of these.

    Those have positions on a line of their own: rows count down from -1, item by item, and then for the LLM's tokens.
    """
    first_row, sources = _rows_handed_over(place, step)
    rows, positions, is_patch, counts, last = [], [], [], [], [torch.arange(0)]
    for image, patches in zip(images, packed.positions.split(packed.lengths), strict=True):
        before = step.lengths[image.sample_id].items[: image.item_index]
        num_before = step.graph.unit(place.unit).num_conditions - 1
        given = [*list_conditions(step.graph, place.unit, before), (image.item_index, num_before)]
        rows += [first_row[Atom(image.sample_id, index)] + torch.arange(count) for index, count in given]
        rows.append(torch.full((len(patches),), first_row[image] + num_before))
        last.append(rows[-1][:1].expand(sum(count for _, count in given) + len(patches)))
        places = [torch.stack((torch.full((count,), -1 - line), torch.arange(count)), 1) for line, (_, count) in enumerate(given)]
        positions += [*places, patches]
        num_given = sum(count for _, count in given)
        is_patch.append(torch.arange(num_given + len(patches)) >= num_given)
        counts.append(num_given + len(patches))
    return dataclasses.replace(
        packed,
        lengths=tuple(counts),
        positions=torch.cat([packed.positions[:0], *positions]),
        condition_rows=torch.cat([torch.arange(0), *rows]),
        last_condition_rows=torch.cat(last) if step.graph.num_carried(place.unit, 0) else None,
        item_sources=sources,
        target_rows=torch.cat([torch.zeros(0, dtype=torch.bool), *is_patch]).nonzero()[:, 0],
    )


def _rows_handed_over(place: MicrobatchPlace, step: StepDecision) -> tuple[dict[Atom, int], torch.Tensor]:
    """Return the first row of every item among the received ones, route by route, and the source unit of each row."""
    graph, lengths, first_row, sources = step.graph, step.lengths, dict[Atom, int](), list[int]()
    num_conditions = graph.unit(place.unit).num_conditions
    for route in step.routes.to_target[place]:
        number = graph.upstream(place.unit).index(route.source.unit)
        is_llm = route.source.unit == graph.backbone.name
        for atom in list_items(route.atoms, unit=place.unit, lengths_by_sample=lengths) if is_llm else route.atoms:
            first_row[atom] = len(sources)
            sources += [number] * (num_conditions if is_llm else lengths[atom.sample_id].items[atom.item_index].num_output_tokens)
    return first_row, torch.tensor(sources, dtype=torch.int64)


def _language_input(source: SampleSource, place: MicrobatchPlace, step: StepDecision) -> tuple[PackedInput, tuple[int, ...]]:
    has_places = bool(step.graph.backbone.transformer.rotary_sections)
    images = {
        unit.name: unit.image
        for unit in step.graph.encoders
        if unit.image is not None and unit.queries is None and step.graph.item_units(unit.name) == (unit.name,)
        if not unit.image.has_row_ends
    }  # results of queries, and of other encoders' joins, have no rows and columns, and row ends none that are known
    atoms, routes = step.assignment.atoms(place), step.routes.to_target.get(place, ())
    packed, item_spans = pack_language_microbatch(atoms, source=source, images=images if has_places else None)
    items = tuple(ItemSpan(*item_spans[atom], route.source.unit) for route in routes for atom in route.atoms)
    ends = []  # for each item: the tokens that end the rows of an image
    for unit_name, atom in ((route.source.unit, atom) for route in routes for atom in route.atoms):
        image, num_tokens = step.graph.unit(unit_name).image, item_spans[atom][1]
        has_ends, width = image is not None and image.has_row_ends, source.item_grid(*atom)[1] + 1
        ends.append(torch.arange(num_tokens) % width == width - 1 if has_ends else torch.zeros(num_tokens, dtype=torch.bool))
    num_conditions = {unit.name: unit.num_conditions for unit in step.graph.generators}
    generator_rows = [
        first + token
        for (sample_id, _), first in zip(atoms if num_conditions else (), accumulate(packed.lengths, initial=0), strict=False)
        for index, item in enumerate(step.lengths[sample_id].items)
        if item.unit in num_conditions
        for token in condition_tokens(item_spans[Atom(sample_id, index)][0] - first, num_conditions[item.unit])
    ]
    sample_ids = [atom.sample_id for atom in atoms]
    sample_of_row = torch.repeat_interleave(*torch.tensor((sample_ids, packed.lengths), dtype=torch.int64))
    samples = tuple(sample_of_row[packed.target_rows].tolist())
    weights = [step.lengths[sample].loss_weight for sample in samples]
    packed = dataclasses.replace(
        packed,
        item_rows=torch.cat([torch.arange(item.start, item.start + item.num_tokens) for item in items]) if items else None,
        item_ends=torch.cat(ends) if any(bool(each.any()) for each in ends) else None,
        items=items,
        target_weights=torch.tensor(weights, dtype=torch.float64) if any(weight != 1 for weight in weights) else None,
        generator_rows=torch.tensor(generator_rows) if generator_rows else None,
    )
    return packed, samples
