"""The lengths of items in all the encoders that they pass through."""

from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.sample_lengths import ItemLengths


def pass_item(graph: ModelGraph, item: ItemLengths) -> ItemLengths:
    """Return an item's lengths with those in every encoder that it passes through, and the tokens that enter the LLM at last.

    item: as the encoder alone has it, or a generator. Raises DataError where encoders whose features are laid side by side give
    different numbers of tokens.
    """
    names = graph.item_units(item.unit)
    if len(names) == 1:
        return item
    passes: dict[str, ItemLengths] = {}
    for unit in map(graph.unit, names):
        num_tokens = _num_tokens(graph, unit, item, passes)
        passes[unit.name] = ItemLengths(unit.name, num_tokens, unit.num_outputs(num_tokens))
    return item._replace(num_output_tokens=passes[names[-1]].num_output_tokens, passes=tuple(passes.values()))


def count_llm_tokens(graph: ModelGraph, unit: Unit, grid: tuple[int, int]) -> int:
    """Return the tokens of the LLM that become of an item with this grid, which this encoder is the first to take."""
    assert unit.item_input is not None, f"unit '{unit.name}' takes no items"
    alone = ItemLengths(unit.name, unit.item_input.num_tokens(grid), unit.num_output_tokens(grid))
    return pass_item(graph, alone).num_output_tokens


def first_joined_token(graph: ModelGraph, unit: str, item: ItemLengths, *, source: str) -> int:
    """Return which of an item's tokens inside a unit is the first that another encoder gives."""
    if graph.unit(unit).join == "features":
        return 0
    names = graph.upstream(unit)
    return sum(item.inside(name).num_output_tokens for name in names[: names.index(source)])


def _num_tokens(graph: ModelGraph, unit: Unit, item: ItemLengths, passes: dict[str, ItemLengths]) -> int:
    given = [passes[name].num_output_tokens for name in graph.upstream(unit.name)]
    if not given:  # class tokens are the only ones that an encoder has beside the others of an item
        return item.num_tokens + _has_class(unit) - _has_class(graph.unit(item.unit))
    if unit.join == "features" and len(set(given)) > 1:
        raise DataError(
            f"unit '{unit.name}' lays features side by side, but {', '.join(graph.upstream(unit.name))} give {given} tokens of "
            "an item; use join: sequence, or encoders that give equally many"
        )
    return given[0] if unit.join == "features" else sum(given)


def _has_class(unit: Unit) -> bool:
    return unit.image is not None and unit.image.class_token is not None
