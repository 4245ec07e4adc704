"""The text-only LLM, batches and optimizer that megatron-core's own loop and Braid's are both given."""

from multimodal.values.model_graph import ModelGraph
from tests.distributed.random_source import RandomSource, SampleShape

NUM_STEPS = 20
SEQUENCE_LENGTH = 7
MICRO_BATCH_SIZE = 2
VOCAB_SIZE = 16
LEARNING_RATE = 0.02
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPSILON = 1e-8
CLIP_GRAD = 0.1
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "llm": {
                "role": "backbone",
                "num_layers": 4,
                "hidden_size": 16,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "ffn_hidden_size": 24,
                "add_qkv_bias": True,
                "init_method_std": 0.1,
            }
        }
    }
)
_NUM_TARGETS = (1, 3, 7, 2, 5, 4, 6, 1, 3, 2, 7, 1)


def batch_of_step(step: int) -> RandomSource:
    """Twelve sequences of one length, as GPTModel wants them, with unequal numbers of target tokens."""
    shapes = tuple(SampleShape((), SEQUENCE_LENGTH, num_targets) for num_targets in _NUM_TARGETS)
    return RandomSource(GRAPH, shapes, VOCAB_SIZE, seed=step)
