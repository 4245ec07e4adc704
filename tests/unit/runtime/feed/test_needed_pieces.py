"""What a rank needs of samples that were decoded elsewhere."""

from megatron.runtime.feed.sample_exchange import Piece, needed_pieces
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16}
GRAPH = ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE}}})
PLAN = Plan.from_dict(
    {
        "units": {
            "vision": {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]} for rank in (0, 1)]},
            "llm": {"replicas": [{"stages": [{"ranks": [0], "layers": [[0, 2]]}, {"ranks": [1], "layers": [[2, 4]]}]}]},
        }
    }
)
ASSIGNMENT = Assignment.from_dict({"vision": [[[(0, 0)]], [[(1, 0)], [(2, 0)]]], "llm": [[[(0, -1)], [(1, -1), (2, -1)]]]})
LENGTHS = {sample: SampleLengths(sample, (ItemLengths("vision", 4, 1),), 4, 2) for sample in range(3)}


def test_a_replica_needs_the_pixels_of_its_own_microbatches() -> None:
    needed = needed_pieces(ASSIGNMENT.shape(GRAPH, PLAN), ASSIGNMENT, LENGTHS)
    pixels = [{piece.sample_id for piece in needed[rank] if piece == Piece(piece.sample_id, 0)} for rank in (0, 1)]
    assert pixels == [{0}, {1, 2}]
