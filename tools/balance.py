"""Prints how evenly a balancer spreads batches of real lengths over replicas and microbatches; see docs/balance.md.

python tools/balance.py --lengths L.csv.gz --units vision,llm --replicas vision=32,llm=16 --global-batch-size 512
                        --microbatches 8 --balance orchmllm [--gpus-per-node 8] [--num-batches N] [--seed S] [--json]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.balance import BALANCERS, BalancerRow
from multimodal.balance.balance_options import BalanceOptions, Granularity
from multimodal.balance.batch_work import BatchWork, Imbalance, unit_imbalance
from multimodal.balance.in_order import balance_in_order
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.rearrange_nodes import rearrange_nodes
from multimodal.cost.layers.registry import read_model
from multimodal.data.length_table import read_length_table
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches
from multimodal.values.validate import validate_assignment
from tools.command_line import DEFAULT_VOCAB_SIZE, Parser, padded_vocab_size, program, values_by_unit

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

TOKEN_BYTES = 4
"""Bytes of a token id that the LLM gets."""
AUDIO_TOKEN_BYTES = 2 * 80 * 4
"""Bytes of an audio token: two frames of 80 float32 mel bins make one token of Whisper's encoder."""
SHAPE = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 1, "ffn_hidden_size": 128}
"""Shape of units where no model is given: only their names and the images' patches matter."""


def build_parser() -> Parser:
    """Return the parser of all flags."""
    parser = Parser(prog="balance.py", description=__doc__)
    add = parser.add_argument_group("the data").add_argument
    add("--lengths", type=Path, required=True, metavar="L.csv.gz", help="Lengths of real samples.")
    add("--global-batch-size", type="count", required=True, metavar="N", help="Samples in a batch.")
    add("--num-batches", type="count", default=8, metavar="N", help="Batches to balance (8).")
    add("--seed", type="at_least_zero", default=0, metavar="S", help="Of the order in which samples are drawn (0).")
    add("--keep-order", action="store_true", help="Draw them as they stand: of tools/lengths.py's tables, the run's own batches.")
    add = parser.add_argument_group("the layout").add_argument
    add("--units", type=_names, metavar="A,B", help="Encoders and the LLM, which is the last one.")
    add("--model", type=Path, metavar="M.yaml", help="A model in place of --units: its FLOPs are the costs.")
    add("--vocab-size", type="count", metavar="N", help=f"Padded vocabulary of the LLM (the model's, or {DEFAULT_VOCAB_SIZE}).")
    add("--replicas", type="counts_by_unit", required=True, metavar="UNIT=N,...", help="Replicas of every unit.")
    add("--microbatches", type="count", required=True, metavar="N", help="Microbatches of an LLM replica.")
    add("--gpus-per-node", type="count", default=8, metavar="N", help="Replicas that share a node (8).")
    add = parser.add_argument_group("the balancer").add_argument
    add("--balance", required=True, choices=BALANCERS, help="The balancer.")
    add("--balance-granularity", choices=[*Granularity], default="item", help="What an encoder moves as one (item).")
    add("--refine-encoders", action="store_true", help="Balance encoders by themselves, whoever places the LLM's work.")
    growth = f"How a unit's cost grows with tokens: {', '.join(CostForm)}; W weighs the quadratic term. (linear)"
    add("--unit-costs", type=_costs, default={}, metavar="UNIT=FORM[:W],...", help=growth)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"expected different names with commas between them, found '{text}'")
    return names


def _costs(text: str) -> dict[str, LengthCost]:
    found = {}
    for name, value in values_by_unit(text).items():
        try:
            found[name] = LengthCost.from_text(value)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(f"'{value}' is no cost: {problem}; the forms are {', '.join(CostForm)}") from None
    return found


def build_graph(flags: argparse.Namespace) -> ModelGraph:
    """Return the given model, or one with units of the given names."""
    if (flags.model is None) == (flags.units is None):
        raise ConfigError("give exactly one of --units and --model")
    if flags.model is not None:
        return read_model(flags.model)
    *encoders, backbone = flags.units
    roles = {**dict.fromkeys(encoders, "encoder"), backbone: "backbone"}
    return ModelGraph.from_dict({"units": {name: {"role": role, **SHAPE} for name, role in roles.items()}})


def build_plan(graph: ModelGraph, replicas: Mapping[str, int]) -> Plan:
    """Build a plan with one rank per replica: balancers use only the number of replicas."""
    if set(replicas) != set(graph.unit_names):
        raise ConfigError(f"--replicas names {', '.join(replicas)}; give a number for each of {', '.join(graph.unit_names)}")
    sizes = {name: UnitSizes(data_parallel_size=count) for name, count in replicas.items()}
    return plan_disaggregated(graph, sizes=sizes, world_size=sum(replicas.values()))


def bytes_per_token(graph: ModelGraph) -> dict[str, int]:
    """Return unit -> bytes of raw data per token."""
    sizes = {}
    for unit in graph.units:
        if unit.join is not None:
            sizes[unit.name] = 0  # its input is the outputs of other encoders
        elif unit.role is not Role.BACKBONE and unit.image is not None and "audio" not in unit.name:
            sizes[unit.name] = unit.image.in_channels * unit.image.patch_size**2
        else:
            sizes[unit.name] = AUDIO_TOKEN_BYTES if unit.role is Role.ENCODER else TOKEN_BYTES
    return sizes


def measure_balance(
    balancer: BalancerRow, batches: Iterable[Sequence[SampleLengths]], *, graph: ModelGraph, plan: Plan, options: BalanceOptions
) -> dict[str, Any]:
    """Return each unit's means over all batches, and the median of the milliseconds of a batch; raises AssignmentError."""
    seconds, units = list[float](), {name: list[tuple[Any, ...]]() for name in graph.unit_names}
    token_bytes = bytes_per_token(graph)
    for lengths in batches:
        start = time.perf_counter()
        assignment = balancer(lengths, graph=graph, plan=plan, options=options)
        seconds.append(time.perf_counter() - start)
        validate_assignment(assignment, lengths, graph=graph, plan=plan)
        work = BatchWork(graph, lengths, options)
        before = balance_in_order(work, plan=plan)
        for unit, measures in units.items():
            volume = moved_volume(before, assignment, work, unit=unit, bytes_per_token=token_bytes[unit])
            traffic = rearrange_nodes(volume, ranks_per_node=options.ranks_per_node)
            old, new = (unit_imbalance(each, work, unit=unit) for each in (before, assignment))
            measures.append((old, new, traffic.bytes_before.max(), traffic.bytes_after.max()))
    milliseconds = {"milliseconds": 1e3 * statistics.median(seconds)}
    means = {unit: _means(measures) | milliseconds for unit, measures in units.items()}
    return {"units": means, **milliseconds, "num_batches": len(seconds)}


def _means(measures: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """measures: without and with the balancer, and the most bytes of a rank to other nodes without and with OrchMLLM's Alg. 3."""
    old, new, bytes_before, bytes_after = (np.mean(each, axis=0).tolist() for each in zip(*measures, strict=True))
    before, after = Imbalance(*old), Imbalance(*new)
    return {
        "replica_imbalance": after.replica,
        "microbatch_imbalance": after.microbatch,
        "replica_imbalance_of_longest": after.replica_of_longest,
        "microbatch_imbalance_of_longest": after.microbatch_of_longest,
        "replica_imbalance_before": before.replica,
        "microbatch_imbalance_before": before.microbatch,
        "microbatch_time_std": {"before": before.microbatch_std, "after": after.microbatch_std},
        "inter_node_bytes": {"before": bytes_before, "after": bytes_after},
    }


def moved_volume(before: Assignment, after: Assignment, work: BatchWork, *, unit: str, bytes_per_token: int) -> "csr_matrix":
    """Return [num_replicas, num_replicas] bytes of each batch of `after` that each replica loaded for `before`. O(atoms)."""
    from scipy.sparse import csr_matrix  # loaded when first used

    loaded, made = before.placed[unit], after.placed[unit]
    of_atoms = work.of_unit(unit).num_tokens
    sources = np.zeros(len(of_atoms), np.int64)
    sources[work.numbers(unit, loaded)] = loaded.replica_of_microbatch[loaded.microbatch_of_atom]
    atoms = work.numbers(unit, made)
    entries = bytes_per_token * of_atoms[atoms], (sources[atoms], made.replica_of_microbatch[made.microbatch_of_atom])
    return csr_matrix(entries, shape=(made.num_replicas, made.num_replicas))


@program("balance.py")
def main(argv: Sequence[str]) -> None:
    """Balance and print according to the flags; raises BraidError."""
    flags = build_parser().parse_args(argv)
    graph = build_graph(flags)
    plan = build_plan(graph, flags.replicas)
    costs = flags.unit_costs if flags.model else {**dict.fromkeys(graph.unit_names, LengthCost()), **flags.unit_costs}
    options = BalanceOptions(
        num_microbatches=flags.microbatches,
        granularity=Granularity(flags.balance_granularity),
        refines_encoders=flags.refine_encoders,
        unit_costs=costs,
        ranks_per_node=flags.gpus_per_node,
        vocab_size=padded_vocab_size(flags, graph),
    )
    samples, seed = read_length_table(flags.lengths, graph=graph), None if flags.keep_order else flags.seed
    batches = draw_length_batches(samples, batch_size=flags.global_batch_size, num_batches=flags.num_batches, seed=seed)
    measured = measure_balance(BALANCERS[flags.balance], batches, graph=graph, plan=plan, options=options)
    report = {"balance": flags.balance, "global_batch_size": flags.global_batch_size, **measured}
    if flags.json:
        print(json.dumps(report))
    else:
        print_table(report)


def print_table(report: Mapping[str, Any]) -> None:
    """Print a report for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120, highlight=False)
    console.print(
        f"{report['balance']}: {report['num_batches']} batches of {report['global_batch_size']} samples, "
        f"{report['milliseconds']:.2f} ms each"
    )
    columns = ("replicas max/mean (longest)", "microbatches max/mean (longest)", "microbatch std/mean", "bytes between nodes")
    table = Table("unit", *columns, box=None)
    for unit, measured in report["units"].items():
        std, volume = measured["microbatch_time_std"], measured["inter_node_bytes"]
        table.add_row(
            unit,
            *(
                f"{measured[f'{what}_imbalance_before']:.3f} -> {measured[f'{what}_imbalance']:.3f} "
                f"({measured[f'{what}_imbalance_of_longest']:.3f})"
                for what in ("replica", "microbatch")
            ),
            f"{std['before']:.3f} -> {std['after']:.3f}",
            f"{volume['before']:,.0f} -> {volume['after']:,.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
