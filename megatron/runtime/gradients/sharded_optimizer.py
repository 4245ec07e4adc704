"""AdamW over what one rank keeps of sharded weights (ZeRO-3): each element is stepped by the rank that keeps it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Parameter

from megatron.runtime.gradients.sharded_layer import WeightPiece

BuildAdam = Callable[[Iterable[tuple[Tensor, bool]]], torch.optim.Optimizer]
"""From parameters, each with whether its weights decay."""


class SteppedPiece(NamedTuple):
    """One piece as an optimizer sees it."""

    piece: WeightPiece
    main: Parameter
    """The piece itself, or in bf16 runs its float32 form."""


class ShardedOptimizer(FP32Optimizer):
    """Megatron's plain optimizer, of pieces whose gradients are already summed over everyone who saw their parameters."""

    def __init__(
        self, pieces: Iterable[WeightPiece], *, config: OptimizerConfig, build_adam: BuildAdam, init_state: Callable[..., None]
    ) -> None:
        """pieces: of trained layers; build_adam: makes the optimizer that this one drives."""
        self.stepped: dict[Tensor, SteppedPiece] = {piece.parameter: SteppedPiece(piece, _main(piece)) for piece in pieces}
        adam = build_adam((stepped.main, parameter.dim() > 1) for parameter, stepped in self.stepped.items())
        # Every rank counts its own pieces in the gradient norm, as with Megatron's sharded optimizer.
        super().__init__(adam, replace(config, use_distributed_optimizer=True), init_state)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step, and round what was stepped to the weights' precision."""
        is_done: bool = super().step_with_ready_grads()
        for piece, main in self._rounded():
            piece.weight.copy_(main)
        return is_done

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take over weights that were loaded."""
        for piece, main in self._rounded():
            main.copy_(piece.weight)

    def _rounded(self) -> list[SteppedPiece]:
        return [stepped for stepped in self.stepped.values() if stepped.main.dtype != stepped.piece.weight.dtype]


def _main(piece: WeightPiece) -> Parameter:
    assert piece.gradient is not None, "frozen layers have no optimizer"
    main = Parameter(piece.weight.to(piece.gradient.dtype))
    copy_tensor_model_parallel_attributes(main, piece.parameter)
    main.shared = getattr(piece.parameter, "shared", False)  # type: ignore[attr-defined]
    main.main_grad = piece.gradient  # type: ignore[attr-defined]
    return main
