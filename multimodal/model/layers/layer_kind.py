"""Base class of all kinds of layers as a stage builds and runs them, and the values that they exchange.

Deepstack (Meng et al., 2024): an encoder carries the output of some of its layers to its projector, and the LLM the projector's
results from its embedding to its first layers, behind each of which it adds one. Between layers they are separate tensors, before
the hidden states; in messages, and at the outputs of a unit's first and last layer, they are channels behind those.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter

from multimodal.attention.packed_lengths import PackedLengths
from multimodal.cost.layers.layer import Exchange
from multimodal.model.adapter import DOWN, UP
from multimodal.model.collectives import LEAST_FILLED, Arriving, RankLink
from multimodal.model.parameter_sharding import WHOLE, ParameterSharding
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions
from multimodal.values.model_graph import ModelGraph, Role, Unit


class InputContext(NamedTuple):
    """The facts that determine the values which a unit's layers derive from a microbatch's lengths."""

    graph: ModelGraph
    unit: Unit
    options: BuildOptions
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    def num_padded_rows(self, num_tokens: int) -> int:
        """Return the padded rows of the tensor parallel group's tokens: at least one, even on a rank without tokens."""
        is_shared = self.options.sequence_parallel and self.tensor_parallel_size > 1
        multiple = self.options.row_multiple * (self.tensor_parallel_size if is_shared else 1)  # so that ranks have equal shares
        rows = -(-max(1, num_tokens) // multiple) * multiple
        return self.buffer_rows if LEAST_FILLED * self.buffer_rows <= rows <= self.buffer_rows else rows

    @property
    def buffer_rows(self) -> int:
        """Rows of the user buffers of the unit's collectives; 0: it uses none."""
        uses = self.unit.role is Role.BACKBONE and self.tensor_parallel_size > 1 and not self.unit.needs_local_layers
        return (self.options.buffer_rows or 0) if uses else 0


@dataclass(frozen=True)
class LayerContext:
    """The facts that a layer is built from."""

    graph: ModelGraph
    unit: Unit
    config: TransformerConfig
    groups: ProcessGroupCollection
    """Tensor, context and pipeline parallel groups of this rank in the unit."""
    options: BuildOptions
    vocab_size: int = 0
    """Padded; for the LLM only."""

    @property
    def input_context(self) -> InputContext:
        """The part that inputs depend on."""
        return InputContext(self.graph, self.unit, self.options, self.groups.tp.size(), self.groups.cp.size())

    @property
    def implementation(self) -> str:
        """`local` or `transformer_engine`: whose transformer layers the unit has."""
        return "local" if self.unit.needs_local_layers else self.options.transformer_impl

    @property
    def patch_channels(self) -> int:
        """Number of values from which a token of the unit's items is made."""
        assert self.unit.item_input is not None, f"unit '{self.unit.name}' has no image and no audio"
        return self.unit.item_input.num_patch_values

    @property
    def condition_size(self) -> int:
        """Width of the conditions that the LLM and encoders hand to generators."""
        return self.graph.backbone.transformer.hidden_size

    def empty(self, *shape: int) -> Parameter:
        """Return an uninitialised parameter."""
        return Parameter(torch.empty(*shape, device=torch.cuda.current_device(), dtype=self.config.params_dtype))

    def random(self, *shape: int) -> Tensor:
        """Return random values on the device, of the type that the unit computes in."""
        return torch.randn(*shape, device=torch.cuda.current_device(), dtype=self.options.params_dtype)

    def build_alike(self, build: Callable[[], Module]) -> Any:
        """Build a module of another library with its own initial values, the same on all ranks, and place it on the device.

        It stays in inference mode: dropout is off.
        """
        seed = int.from_bytes(hashlib.sha256(self.unit.name.encode()).digest()[:7], "little")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.placed(build()).eval()
        module.train = lambda mode=True: module
        return module

    def placed(self, module: Module) -> Any:
        """Move a module to the device, in the type that the unit computes in; diffusers' own `to` warns without a reason."""
        return Module.to(module, device=torch.cuda.current_device(), dtype=self.options.params_dtype)


@dataclass(frozen=True)
class StagePass:
    """Inputs that all layers of a stage may read in one forward."""

    batch: PackedInput
    item_embeddings: Tensor | None
    """Outputs of other units: [num_item_tokens, hidden_size] or, for a generator, [num_conditions, condition_size]."""
    frequencies: Tensor | None
    """[num_rows, 1, 1, head_channels]: rotary angles of all tokens; None where positions are learned."""
    lengths: PackedLengths
    shared_weight: Tensor | None
    """[vocab_size / tp, hidden_size]: tied word embeddings, where the stage has them."""
    num_step_tokens: int = 1
    """The LLM's tokens in the global batch: the divisor of losses that count by token."""
    local_frequencies: Tensor | None = None
    """The angles of layers with windows, if they have some of their own."""


class HeadOutput(NamedTuple):
    """The result of a head for one microbatch."""

    loss_sum: Tensor
    """Sum of the losses of the target tokens (LLM) or of all generated values (generator), float32 (float64 in float64 runs)."""
    is_correct: Tensor | None
    """[num_targets]: True if greedy decoding picks the target; LLM only, and only outside of training."""
    conditions: Tensor | None = None
    """[num_conditions, hidden_size], for generators; LLM only, None where there is nothing to generate."""
    predicted: Tensor | None = None
    """[num_patches, patch_channels] of a generator, or [num_targets, vocab_size] logits of an LLM; only outside of training."""
    token_losses: Tensor | None = None
    """[num_targets], whose sum is the LLM's `loss_sum`; without gradients."""


State = tuple[Tensor, ...]
"""Tensors that one part of a layer hands to the next: hidden states, or the residual stream and the branch's result so far."""


class LayerPart(NamedTuple):
    """The finest part of a layer that has an autograd graph of its own; makes no collective calls (Optimus, 4.2)."""

    run: Callable[[State, StagePass], State]
    behind: Exchange | None = None
    """The collective through which the last tensor of a state goes on its way to the next part."""

    def start(self, tensor: Tensor, link: RankLink, *, is_backward: bool = False) -> Arriving:
        """Start the collective on a tensor that may be overwritten; in a backward, the mirrored one on the tensor's gradient."""
        assert self.behind is not None, "nothing is exchanged behind the part"
        exchange = self.behind.mirrored if is_backward else self.behind
        return (link.start_gathering if exchange is Exchange.GATHER else link.start_summing)(tensor)


Segments = tuple[tuple[LayerPart, ...], ...]
"""The parts of each segment of a layer."""


class LayerKind:
    """Builds, splits, initialises and runs layers of one kind. Has no state: weights are in the module."""

    column_parallel: ClassVar[tuple[str, ...]] = ()
    """Modules whose weights and biases are split over tensor parallel ranks by outputs."""
    row_parallel: ClassVar[tuple[str, ...]] = ()
    """Modules whose weights are split by inputs."""
    residual_ends: ClassVar[tuple[str, ...]] = ()
    """Modules that end a residual branch; their weights start smaller."""
    initialises_itself: ClassVar[bool] = False
    """True if the built module already has its initial values."""

    def __init__(self, module: type[Module] | None = None) -> None:
        """module: its class, built from a LayerContext and called as `run` is, unless `build` and `run` are overridden."""
        if module is not None:
            self.module = module

    def build(self, context: LayerContext, index: int) -> Module:
        """Build the layer at `index` of its unit, uninitialised; an attribute `fixed` names parameters that are never trained."""
        return self.module(context)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor | HeadOutput:
        """Run the layer.

        hidden: [rows, 1, hidden_size], padded and / tp under sequence parallelism. Returns the same shape; a unit's first layer
        (`hidden` is None) returns all rows of the batch, [num_tokens, 1, hidden_size], which the stage pads and shares; the last
        one of the LLM or a generator returns a HeadOutput.
        """
        return layer(hidden, given)

    def prepare(self, packed: PackedLengths, context: InputContext) -> None:
        """Derive, on the CPU and ahead of the step, the values that layers of this kind need from a microbatch's lengths."""
        return

    def segments(self, layer: Module) -> Segments | None:
        """Return the parts of each segment of a layer that can be cut, which are those of its costs; None: it runs as a whole.

        Run in sequence, they compute the same as `run`.
        """
        return None

    def sharding(self, unit: Unit, name: str) -> ParameterSharding:
        """Return the split of a parameter, by its name in the layer; an adapter's matrix is split like its module's weight."""
        owner, _, tensor = name.rpartition(".")
        owner = owner.rpartition(".")[2]
        if owner in self.column_parallel and tensor in ("weight", "bias", UP):
            return ParameterSharding(0, self.num_blocks(unit, owner))
        return ParameterSharding(1) if owner in self.row_parallel and tensor in ("weight", DOWN) else WHOLE

    def num_blocks(self, unit: Unit, module: str) -> int:
        """Return the number of stacked matrices in a column parallel module, of each of which a rank has a part."""
        return 1

    def initial_std(self, unit: Unit, name: str) -> float:
        """Return the initial standard deviation of a matrix, by Megatron's scheme."""
        shape = unit.transformer
        ends_branch = any(f"{module}." in name for module in self.residual_ends)
        return shape.init_method_std / (math.sqrt(2 * max(1, shape.num_layers)) if ends_branch else 1)

    def initial_vector(self, name: str) -> float:
        """Return the initial value of all entries of a vector: 1 for norms, 0 for biases."""
        return 1.0 if name.endswith("norm.weight") else 0.0

    def initial_matrix(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the whole initial matrix if it is not drawn at random; None if it is."""
        return None

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return random inputs for profiling, in addition to hidden states: fields of PackedInput, and `item_embeddings`."""
        return {}, None


class CarriedStates(NamedTuple):
    """The hidden states that are passed on from layer to layer inside a unit."""

    graph: ModelGraph
    unit: str

    def count(self, layer: int) -> int:
        """Return the number of hidden states that are carried behind a layer; none before the first one."""
        return self.graph.num_carried(self.unit, layer) if layer >= 0 else 0

    def split(self, hidden: Tensor, *, behind: int) -> State:
        """Return the carried states behind a layer, then its hidden states; hidden: all in one tensor, [rows, 1, channels]."""
        if not self.count(behind):
            return (hidden,)
        # A view of a leaf reports that it needs a gradient even if none is recorded.
        whole = hidden if torch.is_grad_enabled() else hidden.detach()
        own, *carried = whole.chunk(1 + self.count(behind), dim=-1)
        return (*carried, own)

    @staticmethod
    def join(state: State) -> Tensor:
        """Return the hidden states with the carried ones behind their channels."""
        return state[0] if len(state) == 1 else torch.cat((state[-1], *state[:-1]), dim=-1)

    def enter(self, layer: int, state: State) -> tuple[State, Tensor | None]:
        """Return the states that bypass a layer, and its input; a unit's last layer takes all of them, as a generator's do."""
        if not state:
            return (), None
        if self.graph.unit(self.unit).role is Role.GENERATOR:
            return state[:-1], self.join(state)
        if layer == len(self.graph.unit(self.unit).layers) - 1:
            return (), self.join(state)
        return state[:-1], state[-1]

    def leave(self, layer: int, carried: State, output: Tensor) -> State:
        """Return the state behind a layer; carried: the states that bypassed it."""
        unit = self.graph.unit(self.unit)
        if layer == 0:
            *carried_on, own = self.split(output, behind=0)
            return (*carried_on, own.contiguous())  # otherwise the first norm would also keep the rest
        if layer == len(unit.layers) - 1:
            return (output,)
        if self.count(layer) > len(carried):
            return (*carried, output, output)
        if self.count(layer) < len(carried):
            return (*carried[1:], output + carried[0])
        return (*carried, output)

    def past(self, layer: int, segments: Segments) -> Segments:
        """Return the segments of a layer between a unit's ends, with parts that pass the carried states on."""
        count = self.count(layer - 1)
        if not (count or self.count(layer)):
            return segments

        def taking_along(part: LayerPart, *, is_last: bool) -> LayerPart:
            def run(state: State, given: StagePass) -> State:
                carried, output = state[:count], part.run(state[count:], given)
                return self.leave(layer, carried, output[0]) if is_last else (*carried, *output)

            return part._replace(run=run)

        last = segments[-1][-1]
        return tuple(tuple(taking_along(part, is_last=part is last) for part in segment) for segment in segments)

    def between_stages(self, parts: tuple[LayerPart, ...], layers: range) -> tuple[LayerPart, ...]:
        """Return the parts of a stage's layers, from the tensor that it receives to the tensor that it sends."""
        if self.count(layers.start - 1):
            begin = parts[0].run

            def run_first(state: State, given: StagePass) -> State:
                return begin(self.split(state[0], behind=layers.start - 1), given)

            parts = (parts[0]._replace(run=run_first), *parts[1:])
        if self.count(layers.stop - 1) and layers.stop < len(self.graph.unit(self.unit).layers):
            end = parts[-1].run
            parts = (*parts[:-1], parts[-1]._replace(run=lambda state, given: (self.join(end(state, given)),)))
        return parts
