"""Describes a run before its first step and after its last one."""

import math
from dataclasses import dataclass

from megatron.runtime.checkpoint.folder import find_newest_checkpoint
from megatron.runtime.launch.failure import StopReason
from megatron.runtime.report.reporting import EvaluationReport
from megatron.runtime.session import Session
from megatron.runtime.training.run import Run
from multimodal.cost.engine_limits import Instead, LayerUse, engine_products, limits_met
from multimodal.kernels import describe_kernels
from multimodal.model.layers.layer_kind import InputContext
from multimodal.model.layers.transformer import accumulates_in_engine, attention_choice
from multimodal.model.weight_gradient_queue import find_accumulation
from multimodal.values.model_graph import Unit
from multimodal.values.plan import UnitPlan

_LAYERS = {"local": "local layers", "transformer_engine": "layers of Transformer Engine"}


@dataclass
class Progress:
    """The progress of the training."""

    step: int
    reported_step: int
    saved_step: int | None = None
    evaluated_step: int | None = None
    evaluation: tuple[EvaluationReport | None, EvaluationReport | None] = (None, None)
    """The last one, and that with blank images."""
    peak_bytes: int = 0
    """The largest activations of all ranks and steps."""
    stop: StopReason = StopReason.NONE
    """The reason for ending before the last step."""


def describe_run(run: Run) -> str:
    """Describe in a few lines the units and their ranks."""
    lines = []
    for name, unit in run.session.plan.units.items():
        ranks = sorted(unit.ranks)
        trained = run.session.graph.unit(name)
        frozen = f", adapters of rank {trained.lora.rank}" if trained.lora else ", frozen" if trained.freeze_module else ""
        frozen += f", rows of {len(range(*trained.new_tokens))} new tokens" if trained.new_tokens else ""
        where = f"rank{'s' * (len(ranks) > 1)} {'-'.join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))}"
        lines.append(f"{name}: {unit.describe_sizes()} on {where}{frozen}{_shown_stages(trained, unit)}")
    joined = f" in {run.data.num_train} sequences" if run.config.training.packing_seq_length else ""
    samples = f"{len(run.data.train.source)} training samples{joined}, {run.config.training.global_batch_size} a step"
    resumed = f"; resumed after step {run.done_steps}" if run.done_steps else ""
    schedule = " + ".join([run.config.training.schedule, *filter(None, run.config.training.schedule_passes.split(","))])
    sharded = ", weights sharded" if run.config.parallelism.shards_weights else ""
    return (
        f"{'; '.join(lines)}\n{samples}, {run.config.training.dtype}{sharded}, schedule {schedule}{resumed}"
        f"\n{'' if run.emulation else _describe_paths(run.session) + '; '}decisions by {describe_kernels()}"
    )


def describe_end(run: Run, progress: Progress) -> str:
    """Return one line: the results, and the places of checkpoints and reports."""
    places = []
    logging_config = run.config.logging
    if run.config.checkpoint.save:
        newest = find_newest_checkpoint(run.config.checkpoint.save)
        places.append(f"checkpoint {newest}" if newest else "no checkpoint")
    if logging_config.report_dir:
        places.append(f"report {logging_config.report_dir}/index.html")
    if logging_config.log_json:
        places.append(f"log {logging_config.log_json}")
    if progress.stop:
        without = "" if run.config.checkpoint.save else "; nothing is saved without --save DIR"
        return "; ".join([f"stopped by {progress.stop.describe()} after step {progress.step}{without}", *places])
    results, (evaluation, blank_evaluation) = f"step {progress.step} done", progress.evaluation
    if evaluation and not math.isnan(evaluation.answer_accuracy):
        results += f": {evaluation.answer_accuracy:.1%} of held-out answers right"
    if blank_evaluation and not math.isnan(blank_evaluation.answer_accuracy):
        results += f" ({blank_evaluation.answer_accuracy:.1%} with blank images)"
    if progress.peak_bytes:
        results += f"; activations took up to {progress.peak_bytes / 2**20:.1f} MiB a rank"
    return "; ".join([results, *places])


def _shown_stages(unit: Unit, plan: UnitPlan) -> str:
    if plan.num_virtual_stages == 1 or plan.is_unlike:
        return ""
    last = unit.num_inner_layers
    counts = [min(each.layers.stop, last + 1) - max(each.layers.start, 1) for each in plan.replicas[0].virtual_stages]
    return f", {' + '.join(map(str, counts))} layers"


def _describe_wide_products(session: Session) -> str:
    """Say which products are not in FP8, whose widths do not allow it."""
    found = {}
    for unit in session.graph.units:
        size = max(session.plan.units[unit.name].tensor_sizes)
        products = engine_products(session.graph, unit, size, session.options.build.fp8_recipe)
        if wide := dict.fromkeys(product.name for product in products if not product.is_in_fp8):
            found[unit.name] = ", ".join(wide)
    return "".join(f"; in bfloat16 {name}: {products}" for name, products in found.items())


def _describe_paths(session: Session) -> str:
    """Return one line: the implementation of layers, the attention of each unit, and what is fused or in FP8."""
    graph, options = session.graph, session.options.build
    layers, is_engine = _LAYERS[options.transformer_impl], options.transformer_impl == "transformer_engine"
    local = [unit.name for unit in graph.units if is_engine and limits_met(LayerUse(unit=unit), Instead.LOCAL_UNIT)]
    parts = [f"{layers} ({' and '.join(local)}, for its norms or modulation: {_LAYERS['local']})" if local else layers]
    if options.fp8_format is not None:
        parts.append(f"in FP8 ({options.fp8_format}, {options.fp8_recipe}{_describe_wide_products(session)})")
    if options.fuses_kernels:
        parts.append("fused activations and rotation")
    in_local_layers = options.accumulates_in_products and find_accumulation(options.params_dtype)
    if accumulates_in_engine(options) if is_engine else in_local_layers:
        parts.append("weight gradients added in products")
    if options.buffer_rows is not None:
        parts.append(f"tensor parallel collectives of the LLM in user buffers of {options.buffer_rows} rows")
    backends = {}
    for unit in graph.units:
        sizes = max(session.plan.units[unit.name].tensor_sizes), session.plan.units[unit.name].context_parallel_size
        choice = attention_choice(InputContext(graph, unit, options, *sizes), window=unit.transformer.sliding_window)
        backends[unit.name] = " and ".join(dict.fromkeys((choice.backend, choice.alone)))
    attention = ", ".join(f"{name}: {backend}" for name, backend in backends.items())
    if len(set(backends.values())) == 1:
        (attention,) = set(backends.values())
    return f"computed by {', '.join(parts)}; attention by {attention}"
