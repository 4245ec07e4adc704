"""Lengths of samples that are all alike, as papers state them: so many tokens in each unit."""

from collections.abc import Mapping

from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.sample_lengths import ItemLengths, SampleLengths


def uniform_lengths(graph: ModelGraph, *, tokens: Mapping[str, int], num_samples: int) -> tuple[SampleLengths, ...]:
    """Return samples with one item for each encoder and generator named in `tokens`.

    tokens: unit -> tokens inside the unit. The backbone's are all tokens of its sequence, those that come from encoders
    (`merge_factor` times fewer than inside the encoder) included; the rest is text, and all text counts in the loss.

    Raises DataError for a unit that the model lacks, or when the backbone's tokens cannot hold the encoders'.
    """
    backbone = graph.backbone.name
    if unknown := [name for name in tokens if name not in graph.unit_names]:
        raise DataError(f"lengths are given for '{unknown[0]}'; the model's units are {', '.join(graph.unit_names)}")
    if backbone not in tokens:
        raise DataError(f"no length is given for the backbone; add {backbone}=TOKENS")
    items = []
    for unit in graph.units:
        if unit.name in tokens and unit.role is not Role.BACKBONE:
            is_encoder = unit.role is Role.ENCODER
            num_outputs = -(-tokens[unit.name] // unit.merge_factor) if is_encoder else 0
            items.append(ItemLengths(unit.name, tokens[unit.name], num_outputs))
    num_text_tokens = tokens[backbone] - sum(item.num_output_tokens for item in items)
    if num_text_tokens < 1:
        raise DataError(
            f"{backbone}={tokens[backbone]} tokens have no room for text beside the {tokens[backbone] - num_text_tokens} tokens "
            f"that encoders hand on; raise {backbone}'s length"
        )
    return tuple(SampleLengths(sample, tuple(items), num_text_tokens, num_text_tokens) for sample in range(num_samples))
