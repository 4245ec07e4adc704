"""The lengths of items in all the encoders that they pass through."""

from collections.abc import Iterator, Sequence

from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.sample_lengths import ItemLengths


def pass_items(graph: ModelGraph, items: Sequence[ItemLengths]) -> tuple[ItemLengths, ...]:
    """Return the lengths of a sample's items in every unit that they pass through; arguments and errors as of `pass_item`.

    A generator makes its items under the condition of tokens that encoders give it, those of the items before each, and of the
    LLM's last tokens; the last one of these is added to all patches.
    """
    passed: list[ItemLengths] = []
    for item in items:
        num_given = sum(count for _, count in list_conditions(graph, item.unit, passed))
        num_tokens = item.num_tokens + num_given + graph.unit(item.unit).num_conditions - 1
        passes = (ItemLengths(item.unit, num_tokens, item.num_tokens),)
        passed.append(item._replace(passes=passes) if num_tokens > item.num_tokens else pass_item(graph, item))
    return tuple(passed)


def list_conditions(graph: ModelGraph, generator: str, items: Sequence[ItemLengths]) -> Iterator[tuple[int, int]]:
    """Yield the items that condition a generator's item, with their tokens; items: all that come before the generator's item."""
    sources = graph.conditions(generator)
    return ((index, each.num_output_tokens) for index, each in enumerate(items) if each.units[-1] in sources)


def condition_tokens(start: int, count: int) -> list[int]:
    """Return the LLM's tokens that condition an item, in its sample; the first one stands for those before the sample.

    start: the token that opens the item; count: how many there are (`Unit.num_conditions`).
    """
    return [max(0, token) for token in range(start + 1 - count, start + 1)]


def pass_item(graph: ModelGraph, item: ItemLengths) -> ItemLengths:
    """Return an item's lengths in every encoder that it passes through, and the tokens that finally enter the LLM.

    item: its lengths in the first encoder, or in a generator. Raises DataError if encoders whose features are joined side by side
    give different numbers of tokens.
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
    """Return the number of LLM tokens of an item with this grid; unit: the first encoder that takes it."""
    assert unit.item_input is not None, f"unit '{unit.name}' takes no items"
    alone = ItemLengths(unit.name, unit.item_input.num_tokens(grid), unit.num_output_tokens(grid))
    return pass_item(graph, alone).num_output_tokens


def first_joined_token(graph: ModelGraph, unit: str, item: ItemLengths, *, source: str) -> int:
    """Return the index of the first of an item's tokens inside a unit that comes from the encoder `source`."""
    if graph.unit(unit).join == "features":
        return 0
    names = graph.upstream(unit)
    return sum(item.inside(name).num_output_tokens for name in names[: names.index(source)])


def _num_tokens(graph: ModelGraph, unit: Unit, item: ItemLengths, passes: dict[str, ItemLengths]) -> int:
    given = [passes[name].num_output_tokens for name in graph.upstream(unit.name)]
    if not given:  # class tokens are the only tokens that an encoder adds to those of an item
        return item.num_tokens + _num_class_tokens(unit) - _num_class_tokens(graph.unit(item.unit))
    if unit.join == "features" and len(set(given)) > 1:
        raise DataError(
            f"unit '{unit.name}' lays features side by side, but {', '.join(graph.upstream(unit.name))} give {given} tokens of "
            "an item; use join: sequence, or encoders that give equally many"
        )
    return given[0] if unit.join == "features" else sum(given)


def _num_class_tokens(unit: Unit) -> int:
    return 0 if unit.image is None else unit.image.num_class_tokens
