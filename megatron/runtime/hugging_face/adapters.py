"""Adapters by the weights that they belong to."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from megatron.runtime.gradients.sharded_unit import LayerKey, ShardedUnit
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, rows_of_tensor
from multimodal.model.adapter import Adapter, adapter_of
from multimodal.values.units.unit import NEW_ROWS

VOCABULARIES = "word_embeddings.weight", "output_layer.weight"
"""Ends of the keys of matrices with a row for every token."""


def new_row_tensors(tensors: Iterable[HeldTensor], tokens: range) -> list[HeldTensor]:
    """Return the rows of these tokens in matrices of the vocabulary, under the keys of what is added to new rows; views."""
    keys = ((each, f"{each.key.removesuffix('weight')}{NEW_ROWS}") for each in tensors if each.key.endswith(VOCABULARIES))
    found = (rows_of_tensor(tensor, tokens, key=key) for tensor, key in keys)
    return [each for each in found if each.pieces]


def gather_adapters(session: Session) -> Mapping[str, Adapter]:
    """Return this rank's adapters by the key of their weight (`model.<unit>.<parameter>`); collective under ZeRO-3."""
    found = {}
    for (unit, index), stage in session.stages.items():
        gradients = session.gradients[unit]
        for layer in stage.layer_range:
            adapted = {
                name: adapter
                for name, each in stage.layers[str(layer)].named_modules()
                if (adapter := adapter_of(each)) and each.weight is not None
            }
            gathered: AbstractContextManager[None] = nullcontext()
            if adapted and isinstance(gradients, ShardedUnit):
                gathered = gradients.sharded[index].layers[LayerKey(layer, is_trained=True)].whole()
            with gathered:
                for name, (down, up, scale) in adapted.items():
                    copies = down.detach().clone(), up.detach().clone()
                    found[f"model.{unit}.layers.{layer}.{name}.weight"] = Adapter(*copies, scale)
    return found
