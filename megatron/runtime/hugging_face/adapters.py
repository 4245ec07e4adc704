"""Adapters by the weights that they belong to."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from megatron.runtime.gradients.sharded_unit import LayerKey, ShardedUnit
from megatron.runtime.session import Session
from multimodal.model.adapter import Adapter, adapter_of


def gather_adapters(session: Session) -> Mapping[str, Adapter]:
    """Return this rank's adapters by the key of their weight (`model.<unit>.<parameter>`); collective under ZeRO-3."""
    found = {}
    for (unit, index), stage in session.stages.items():
        gradients = session.gradients[unit]
        for layer in stage.layer_range:
            adapted = {name: adapter for name, each in stage.layers[str(layer)].named_modules() if (adapter := adapter_of(each))}
            gathered: AbstractContextManager[None] = nullcontext()
            if adapted and isinstance(gradients, ShardedUnit):
                gathered = gradients.sharded[index].layers[LayerKey(layer, is_trained=True)].whole()
            with gathered:
                for name, (down, up, scale) in adapted.items():
                    copies = down.detach().clone(), up.detach().clone()
                    found[f"model.{unit}.layers.{layer}.{name}.weight"] = Adapter(*copies, scale)
    return found
