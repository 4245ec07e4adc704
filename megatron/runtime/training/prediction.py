"""What steps are predicted with while training: the run's own plan and schedule, on a described machine.

All ranks must predict alike, so nothing here is measured.
"""

import os

import torch

from megatron.runtime.flags.configuration import RunConfig
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster, Network, NodeLink, peak_tflops
from multimodal.cost.run_options import RunOptions
from multimodal.schedule.schedule_cache import ScheduleCache

_GLOO = NodeLink(1.5, 70.0), Network(1.0, 100.0, 1)
_NVLINK = NodeLink(450.0, 3.0), Network(50.0, 8.0, 1)
_CPU_TFLOPS = 0.118
"""Of one core, as in examples/clusters/cpu.yaml, which says where these numbers come from."""
_UNKNOWN_DEVICE_TFLOPS = 500.0


def build_predictor(config: RunConfig, schedules: ScheduleCache, *, vocab_size: int) -> StepPredictor:
    """Predict steps as `schedules` would run them on --cluster; raises ConfigError when that cannot be read."""
    training = config.training
    cluster = Cluster.from_file(training.cluster) if training.cluster else assumed_cluster()
    default_stage = 0 if training.dtype == "float64" else 1
    options = RunOptions(
        recompute=training.recompute_granularity,
        zero_stage=3 if config.parallelism.shards_weights else default_stage,
        sequence_parallel=config.parallelism.sequence_parallel,
        transformer_impl=config.model.transformer_impl,
        num_overlapped_parts=config.parallelism.num_overlapped_parts,
    )
    return StepPredictor(schedules, cluster, vocab_size, options)


def assumed_cluster() -> Cluster:
    """Return a machine like this one, by the accelerator's name: what matters is how computing and sending compare."""
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available():
        return Cluster(
            ranks_per_node,
            _CPU_TFLOPS,
            8.0,
            *_GLOO,
            efficiency=0.87,
            half_efficiency_gflop=0.014,
            attention_efficiency=0.3,
            memory_bandwidth_gbytes_per_second=4.0,
            dtype="float32",
        )
    peak = peak_tflops(torch.cuda.get_device_name(), "bfloat16") or _UNKNOWN_DEVICE_TFLOPS
    return Cluster(ranks_per_node, peak, 80.0, *_NVLINK)
