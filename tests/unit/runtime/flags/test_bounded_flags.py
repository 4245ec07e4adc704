"""No number that is a typing error takes memory or time: it is refused while flags are read, or changes nothing."""

from pathlib import Path

import pytest
import yaml

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import all_flags, whole_number
from multimodal.values.errors import ConfigError, PlanError

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
BASE = {"--data-path": "digits", "--lr": "1e-3", "--train-iters": "10", "--global-batch-size": "8", "--vision-dp": "1"}
HARMLESS_WHEN_LARGE = {
    # intervals: what is never due
    *("exit_interval", "eval_interval", "save_interval", "log_interval", "timeline_interval", "keep_last_checkpoints"),
    "save_retain_interval",
    # bounded by rules about two flags: warm-up and decay, microbatch and global batch
    *("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters", "micro_batch_size"),
    "max_image_pixels",  # itself a bound
    "profile_ranks",  # names, not counts
}


def parse(folder: Path, *flags: str) -> RunConfig:
    """Parse flags on top of a base that is right."""
    units = {"vision": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE}}
    (folder / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
    base = [part for pair in BASE.items() if pair[0] not in flags for part in pair]
    return parse_arguments(["--model", str(folder / "model.yaml"), *base, *flags], environ={"WORLD_SIZE": "2"})


def test_every_count_has_an_upper_bound() -> None:
    counts = [flag for flag in all_flags() if flag.parse is whole_number]
    unbounded = {flag.name for flag in counts if flag.maximum is None}
    assert unbounded == HARMLESS_WHEN_LARGE


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        (
            "--distributed-timeout-minutes",
            "1e30",
            "--distributed-timeout-minutes must be at most 30000, found 1e+30",
        ),
        ("--global-batch-size", "1000000000", "--global-batch-size must be at most 131072, found 1000000000"),
        ("--train-iters", "9" * 20, "--train-iters must be at most 1000000000"),
        ("--num-workers", "100000", "--num-workers must be at most 256"),
        ("--make-vocab-size-divisible-by", "1000000000", "--make-vocab-size-divisible-by must be at most 65536"),
        ("--eval-iters", "9" * 20, "--eval-iters must be at most 1000000000"),
        ("--seq-length", "9" * 20, "--seq-length must be at most 1000000000"),
        ("--digits-samples", "9" * 20, "--digits-samples must be at most 1000000000"),
        ("--micro-batch-size", "9" * 20, "is larger than --global-batch-size 8"),
        ("--exit-duration-in-mins", "1e300", "--exit-duration-in-mins must be at most 1000000000"),
        ("--seed", "9" * 30, "--seed must be at most 4294967295"),
    ],
)
def test_a_typing_error_is_refused(tmp_path: Path, flag: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, flag, value)
    assert says in str(caught.value)


def test_a_step_of_too_many_microbatches_is_refused(tmp_path: Path) -> None:
    says = "--global-batch-size 100000 gives a replica of the LLM 100000 microbatches of --micro-batch-size 1 in one step"
    with pytest.raises(ConfigError, match=f"{says}.* 16384; lower the former, raise the latter or --llm-data-parallel-size"):
        parse(tmp_path, "--global-batch-size", "100000")
    assert parse(tmp_path, "--global-batch-size", "100000", "--micro-batch-size", "8").training.global_batch_size == 100000


@pytest.mark.parametrize("size", ["tp", "pp", "cp", "dp"])
def test_a_size_beyond_the_processes_is_refused_before_anything_is_built(tmp_path: Path, size: str) -> None:
    with pytest.raises((PlanError, ConfigError)):
        parse(tmp_path, f"--llm-{size}", "9" * 12)
