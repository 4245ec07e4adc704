"""Examples as runs open them."""

from megatron.runtime.feed.data_sets import build_data_sets, padded_vocab_size
from megatron.runtime.flags.arguments import choose_trained, parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.orchestrator.orchestrate import Inputs
from multimodal.values.model_graph import ModelGraph
from tests.sanity.repository import ROOT

EXAMPLES, MORE_LAYERS = ROOT / "examples", ROOT / "tests" / "unit" / "runtime" / "six_layers.yaml"


def open_example(line: str = "", *, example: str = "digits", num_ranks: int = 8) -> tuple[RunConfig, Inputs]:
    """Open what a run of an example trains, of the digits with more layers; line: flags beside its configuration."""
    model = ["--model", str(MORE_LAYERS)] if example == "digits" else []
    given = ["--config", str(EXAMPLES / example / "config.yaml"), *model, *line.split()]
    config = parse_arguments(given, environ={"WORLD_SIZE": str(num_ranks)})
    graph = choose_trained(ModelGraph.from_file(config.model.model), config.model)
    data = build_data_sets(config, graph)
    return config, Inputs(graph, data, padded_vocab_size(data.tokenizer, config, graph=graph))
