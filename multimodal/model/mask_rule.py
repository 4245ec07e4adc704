"""How the tokens of a unit attend to each other."""

from multimodal.attention.bitfield import MaskMode
from multimodal.attention.packed_mask import MaskRule
from multimodal.values.model_graph import ModelGraph, Role, Unit


def mask_rule_of(unit: Unit, *, graph: ModelGraph, mode: MaskMode) -> MaskRule:
    """An LLM's mask follows the mode; every sequence of another unit is one item and attends to all of itself."""
    if unit.role is not Role.BACKBONE:
        return MaskRule(is_causal=False)
    encoders = tuple(each.name for each in graph.units if each.role is Role.ENCODER)
    return MaskRule(is_causal=True, mode=mode, modalities=encoders)
