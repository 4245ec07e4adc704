"""Models, batches and an optimizer that megatron-core's own loops and Braid's are both given, to compare what they learn."""

from dataclasses import dataclass

from multimodal.values.model_graph import ModelGraph
from tests.distributed.random_source import RandomSource, SampleShape

NUM_STEPS = 20
MICRO_BATCH_SIZE = 2
VOCAB_SIZE = 16
LEARNING_RATE = 0.02
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPSILON = 1e-8
CLIP_GRAD = 0.1


@dataclass(frozen=True)
class ComparedCase:
    """A model and global batches for it."""

    graph: ModelGraph
    shapes: tuple[SampleShape, ...]
    """Of a global batch: all have one number of tokens, as GPTModel wants them."""

    def batch_of_step(self, step: int) -> RandomSource:
        """Return the global batch of a step."""
        return RandomSource(self.graph, self.shapes, VOCAB_SIZE, seed=step)

    @property
    def sequence_length(self) -> int:
        """Tokens of each sample."""
        return self.batch_of_step(0).lengths(0).num_tokens


_LLM = {
    "role": "backbone",
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "add_qkv_bias": True,
    "init_method_std": 0.1,
}
_VISION = {
    "role": "encoder",
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 20,
    "init_method_std": 0.1,
    "image": {"patch_size": 2, "merge_size": 2, "in_channels": 1, "min_pixels": 16, "max_pixels": 4096},
}
_NUM_TARGETS = (1, 3, 7, 2, 5, 4, 6, 1, 3, 2, 7, 1)
_IMAGES = (((2, 3), (1, 1)), ((1, 4),), ((2, 2),), ((1, 2),), ((3, 1), (2, 1)), ((1, 1),)) * 2

TEXT_ONLY = ComparedCase(
    ModelGraph.from_dict({"units": {"llm": _LLM}}), tuple(SampleShape((), 7, num_targets) for num_targets in _NUM_TARGETS)
)
"""Twelve sequences with unequal numbers of target tokens."""
WITH_IMAGES = ComparedCase(
    ModelGraph.from_dict({"units": {"vision": _VISION, "llm": _LLM}}),
    tuple(
        SampleShape(
            tuple(("vision", *image) for image in images), 16 - sum(rows * columns for rows, columns in images), num_targets
        )
        for images, num_targets in zip(_IMAGES, _NUM_TARGETS, strict=True)
    ),
)
"""One or two images each, 1 to 7 of 16 tokens."""
