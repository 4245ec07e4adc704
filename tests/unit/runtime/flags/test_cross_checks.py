"""Every rule about two or more flags, with its message."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.runtime.flags.arguments import choose_trained, parse_arguments
from megatron.runtime.flags.configuration import UNIT_RATES
from megatron.runtime.flags.field_flags import all_flags, whole_number
from megatron.runtime.flags.ignored_flags import IGNORED_FLAGS
from megatron.runtime.flags.unit_flags import shown_flag
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.values.errors import ConfigError, PlanError
from multimodal.values.model_graph import ModelGraph
from tests.unit.runtime.flags.conftest import BACKBONE, BASE, ENCODER, UNITS, Parse

NINES = "9" * 20

IGNORED = [
    ("--min-lr 0 --lr-decay-style constant", "--min-lr would be ignored: --lr-decay-style constant never lowers"),
    ("--lr-decay-iters 5 --lr-decay-style constant", "--lr-decay-iters would be ignored"),
    ("--lr-wsd-decay-iters 5", "--lr-wsd-decay-iters would be ignored: it belongs to --lr-decay-style WSD"),
    ("--lr-wsd-decay-style linear", "--lr-wsd-decay-style would be ignored"),
    ("--lr-warmup-init 1e-4", "--lr-warmup-init would be ignored: there is no warm-up"),
    ("--lora-alpha 8", "--lora-alpha would be ignored: there are no adapters; add --lora-rank N"),
    ("--lora-targets llm.*", "--lora-targets would be ignored: there are no adapters; add --lora-rank N"),
    ("--tokenizer-model t.json", "--tokenizer-model would be ignored: a ByteTokenizer needs no file"),
    ("--chat-template none --data-path m.jsonl", "--chat-template would be ignored: bytes have no special tokens"),
    (
        "--chat-template t.jinja --tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json",
        "--chat-template would be ignored: a program's samples (digits, FILE.py) come in turns of Braid's own",
    ),
    ("--balance-granularity sample", "--balance-granularity would be ignored: only --balance orchmllm and auto"),
    ("--cluster c.yaml --balance orchmllm", "--cluster would be ignored: only --balance disttrain and auto and --schedule eager"),
    ("--cluster c.yaml --balance entrain", "--cluster would be ignored: only --balance disttrain"),
    (
        "--balance-num-microbatches effective",
        "--balance-num-microbatches would be ignored: only --balance entrain and auto group",
    ),
    ("--unit-costs vision=padded --balance disttrain", "--unit-costs would be ignored: only --balance llm-only and orchmllm"),
    ("--new-phase", "--new-phase would be ignored: no checkpoint is resumed"),
    ("--merge-encoders --balance orchmllm", "--merge-encoders would be ignored: only --balance entrain and auto group"),
    ("--num-workers 1 --lengths-from decode", "--num-workers would be ignored: --lengths-from decode loads in a thread"),
    ("--program-samples 5 --data-path m.jsonl", "--program-samples would be ignored: the samples are read, not made"),
    ("--elastic-timeout 9", "--elastic-timeout would be ignored: a lost process ends the run; add --elastic"),
    ("--fault-tolerance 1", "--fault-tolerance would be ignored: a lost process ends the run; add --elastic"),
    ("--split 8,1,1", "--split would be ignored: a program (digits, FILE.py) holds out"),
    ("--allow-outside-paths", "--allow-outside-paths would be ignored: a program (digits, FILE.py) reads no image files"),
    ("--producers a:1", "--producers would be ignored: a program (digits, FILE.py) reads no image files"),
    ("--producers a:1 --emulate c.yaml --data-path m.jsonl", "--producers would be ignored: --emulate waits as long"),
    ("--producer-token t", "--producer-token would be ignored: nothing is decoded elsewhere; add --producers"),
    ("--data-cache-path a", "--data-cache-path would be ignored: a program's samples (digits, FILE.py) have no index"),
    ("--overlong skip", "--overlong would be ignored: a program (digits, FILE.py) makes samples that fit"),
    ("--max-image-pixels 100", "--max-image-pixels would be ignored: a program (digits, FILE.py) reads no image files"),
    ("--eval-interval 5", "--eval-interval would be ignored: nothing is evaluated"),
    ("--eval-blank-images", "--eval-blank-images would be ignored: nothing is evaluated"),
    ("--valid-data-path a=b.jsonl", "--valid-data-path would be ignored: nothing is evaluated"),
    ("--save-best loss", "--save-best would be ignored: nothing is evaluated"),
    ("--eval-iters 1 --save-best loss", "--save-best would be ignored: no checkpoint is written"),
    ("--sample-prompts q.jsonl", "--sample-prompts would be ignored: nothing is evaluated"),
    ("--eval-iters 1 --sample-prompts q.jsonl", "--sample-prompts would be ignored: its folder hands the weights over"),
    ("--sample-max-new-tokens 9", "--sample-max-new-tokens would be ignored: nothing is asked"),
    ("--save-interval 5", "--save-interval would be ignored: no checkpoint is written; add --save DIR"),
    ("--keep-last-checkpoints 5", "--keep-last-checkpoints would be ignored"),
    ("--async-save", "--async-save would be ignored: no checkpoint is written"),
    ("--no-load-optim", "--no-load-optim would be ignored: no checkpoint is resumed; add --load DIR"),
    ("--no-load-rng", "--no-load-rng would be ignored"),
    ("--finetune --load d --no-load-optim", "--no-load-optim would be ignored: --finetune takes over the weights alone"),
    ("--finetune --load d --no-load-rng", "--no-load-rng would be ignored: --finetune takes over the weights alone"),
    ("--finetune", "--finetune would be ignored: it takes over the weights of --load; add --load DIR"),
    ("--finetune --save d", "--finetune would be ignored: it takes over the weights of --load; add --load DIR"),
    ("--pretrained-checkpoint d --no-load-optim", "--no-load-optim would be ignored: no checkpoint is resumed"),
    ("--timeline-interval 5", "--timeline-interval would be ignored: timelines are drawn into the report"),
    ("--sequence-parallel", "--sequence-parallel would be ignored: every unit's tensor parallel size is 1"),
    ("--layer-partition even", "--layer-partition would be ignored: no unit has several pipeline stages; raise"),
    ("--layer-partition even --plan auto", "--layer-partition would be ignored: a plan says which layers every stage has"),
    ("--tp-comm-overlap", "--tp-comm-overlap would be ignored: every unit's tensor parallel size is 1"),
    ("--transformer-impl local --emulate c.yaml", "--transformer-impl would be ignored: --emulate waits as long as its table"),
    ("--attention-backend blocks --emulate c.yaml", "--attention-backend would be ignored: --emulate waits"),
    ("--recompute-activations --emulate c.yaml", "--recompute-granularity would be ignored: --emulate waits"),
    ("--tp-comm-overlap-parts 2", "--tp-comm-overlap-parts would be ignored: tensor parallel collectives are not cut; add"),
    *(
        (line, f"{line.split()[0]} would be ignored: the plan is given; use --plan auto")
        for line in ("--replan", "--plan-review-iters 5", "--plan-time-budget 5")
    ),
    ("--merge-encoders --balance entrain", "--merge-encoders would be ignored: 'vision' is the only encoder"),
    ("--save-retain-interval 5", "--save-retain-interval would be ignored: no checkpoint is written"),
    ("--fp8-recipe delayed", "--fp8-recipe would be ignored: no product is in FP8; add --fp8-format"),
]


@pytest.mark.parametrize(("line", "message"), IGNORED)
def test_flags_that_would_be_ignored(parse_on_base: Parse, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_on_base(line)
    assert message in str(problem.value)


def test_every_row_of_the_table_is_tried() -> None:
    tried = {message.split(" would be")[0] for _, message in IGNORED}
    others = {"--colocate-units", "--attention-mask", "--fp8-format", "--use-pytorch-profiler"}
    others |= {f"--profile-{name}" for name in ("step-start", "step-end", "ranks")}
    others |= {f"--wandb-{name}" for name in ("exp-name", "entity", "save-dir")}
    assert {shown_flag(row.name) for row in IGNORED_FLAGS} - tried == others


def test_every_row_of_the_table_names_fields_that_exist() -> None:
    names = {flag.name for flag in all_flags()}
    assert {name for row in IGNORED_FLAGS for name in (row.name, *row.because_of)} <= names


@pytest.mark.parametrize(
    "line",
    [
        "--min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 8 --lr-warmup-iters 2 --lr-warmup-init 1e-6",
        "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style linear",
        "--tokenizer-model t.json --tokenizer-type HuggingFaceTokenizer",
        "--eval-interval 5 --eval-iters 2 --eval-blank-images",
        "--save d --save-interval 5 --keep-last-checkpoints 1",
        "--load d --no-load-optim --no-load-rng",
        "--load d --finetune --save e",
        "--load d/step_00000005 --finetune --save e --save-interval 5",
        "--pretrained-checkpoint d",
        "--pretrained-checkpoint d --load e --save ./e --no-load-optim",
        "--report-dir d --timeline-interval 5",
        "--data-path m.jsonl --split 1",
        "--data-path m.jsonl --allow-outside-paths --max-image-pixels 178956970",
        "--program-samples 50",
        "--no-merge-encoders --no-replan",  # as is the default
        "--data-path m.jsonl --split 0,1 --skip-train --eval-iters 1",
        "--seed 0 --clip-grad 0 --weight-decay 0 --num-workers 0 --adam-beta1 0",
        "--projector-lr 1e-2 --plan auto",
    ],
)
def test_the_same_flags_where_they_have_an_effect(parse_on_base: Parse, line: str) -> None:
    fields = {flag[2:].removeprefix("no-").replace("-", "_") for flag in line.split() if flag.startswith("--")}
    assert parse_on_base(line).given >= fields


def test_units_have_rates_of_their_own_under_a_planned_plan(parse_on_base: Parse) -> None:
    settings = parse_on_base(
        "--plan auto --vision-lr 1e-5 --projector-lr 1e-2 --llm-weight-decay 0 --vision-projector-lr-warmup-iters 2"
    ).optimizer
    rates = {unit: [settings.rate(unit, name) for name in UNIT_RATES] for unit in ("vision", "language")}
    assert rates == {"vision": [1e-5, 0.01, 0, 1e-2, 0.01, 2], "language": [1e-3, 0.0, 0, 1e-2, 0.01, 0]}


def test_sequence_parallelism_needs_one_unit_with_tensor_parallelism(parse_on_base: Parse) -> None:
    assert parse_on_base("--sequence-parallel --llm-tp 2", world_size=3).parallelism.sequence_parallel


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--micro-batch-size 0", "--micro-batch-size must be at least 1, found 0"),
        ("--micro-batch-size 9", "--micro-batch-size 9 is larger than --global-batch-size 8"),
        ("--skip-train", "--skip-train leaves nothing to do; add --eval-iters N or --save-hf DIR"),
        ("--data-path mine.py", "--data-path mine.py is a program, which does whatever it likes; add --allow-callbacks"),
        ("--data-path digits m.jsonl", "a program's samples (digits, FILE.py) are no part of a mixture"),
        ("--data-path m.jsonl --split 0,1", "--split '0,1' must be one to three proportions"),
        ("--lr 0", "--lr must be above 0, found 0.0"),
        ("--adam-beta1 1", "--adam-beta1 must be at least 0 and below 1, found 1.0"),
        ("--min-lr 0.1", "--min-lr 0.1 is above --lr 0.001"),
        ("--lr-warmup-init 0.1 --lr-warmup-iters 2", "--lr-warmup-init 0.1 is above --lr 0.001"),
        ("--vision-lr 1e-5 --lr-warmup-init 1e-4 --lr-warmup-iters 2", "--lr-warmup-init 0.0001 is above --vision-lr; lower it"),
        ("--vision-lr 0", "argument --vision-lr: expected a number above 0 (to train nothing there: --freeze), found 0"),
        ("--llm-weight-decay=-1", "/--llm-weight-decay: expected a number of at least 0, found -1"),
        ("--llm-projector-lr 1", "unknown flag --llm-projector-lr"),
        ("--vision-lr 1e-5 --freeze vision", "--vision-lr would be ignored: what it is for in unit 'vision' is frozen"),
        (
            "--vision-projector-lr 1e-5 --freeze-projector vision",
            "--vision-projector-lr would be ignored: what it is for in unit 'vision' is frozen",
        ),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10 leaves no step for the decay"),
        ("--lr-warmup-iters 5 --lr-decay-iters 5", "--lr-warmup-iters 5 leaves no step for the decay"),
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "--lr-warmup-iters and --lr-warmup-fraction exclude each other"),
        ("--lr-decay-style WSD", "add --lr-wsd-decay-iters N"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "--lr-wsd-decay-iters 11 is longer than the whole decay"),
        ("--finetune --load d --save d", "--finetune starts at step 0 and --save d would mix its checkpoints with those"),
        ("--finetune --load d/step_00000005 --save d/", "would mix its checkpoints with those that it starts from"),
        ("--pretrained-checkpoint ./d --save d", "--pretrained-checkpoint starts at step 0 and --save d would mix"),
        ("--pretrained-checkpoint d --load e", "but --load e is not where --save writes"),
        ("--pretrained-checkpoint d --load e --save f", "make --load and --save the same folder"),
        ("--pretrained-checkpoint d --load d --finetune", "--finetune and --pretrained-checkpoint exclude each other"),
        ("--tokenizer-type HuggingFaceTokenizer", "add --tokenizer-model PATH"),
        ("--data-path m.jsonl --max-image-pixels 178956971", "--max-image-pixels 178956971 is more than 178956970"),
        ("--data-path m.jsonl --split 0,1,1", "--split '0,1,1' must be one to three proportions"),
        ("--data-path m.jsonl --split a,b,c", "--split 'a,b,c' must be"),
        ("--data-path m.jsonl --split 1,-1,0", "--split '1,-1,0' must be"),
        ("--data-path m.jsonl --split 1,1,1,1", "--split '1,1,1,1' must be"),
        ("--data-path m.jsonl --eval-iters 2 --split 9,0,1", "--eval-iters 2 needs validation samples"),
        ("--data-path m.jsonl --eval-iters 2 --split 9", "--eval-iters 2 needs validation samples"),
        (
            "--plan p.yaml --vision-dp 1",
            "--vision-data-parallel-size and --plan exclude each other: a plan already has every unit's sizes",
        ),
        (
            "--freeze vison",
            "--freeze vison: the model has no such unit; its units are vision (encoder), language (backbone); did you",
        ),
        ("--freeze-projector audio", "--freeze-projector audio: the model has no such unit"),
        ("--freeze-projector llm", "--freeze-projector language: the backbone has no projector; units with one are: vision"),
        (
            "--lora-rank 8 --lora-targets llm.* q_proj",
            "--lora-targets q_proj: no linear layer that may have an adapter is called so; expected one of "
            "vision.transformer.linear_qkv, ",
        ),
        (
            "--lora-rank 8 --lora-targets patch_embedding",
            "--lora-targets patch_embedding: no linear layer that may have an adapter",
        ),
        ("--save-adapter out", "--save-adapter would be ignored: nothing has adapters; add --lora-rank N or leave it out"),
        ("--freeze vision llm --freeze-projector vision", "every unit is frozen, so nothing would be trained"),
        ("--plan auto --schedule gpipe", "--schedule and --plan auto exclude each other: the plan comes with what suits it"),
        ("--plan auto --balance auto", "--balance and --plan auto exclude each other"),
        ("--plan auto --sequence-parallel", "--sequence-parallel and --plan auto exclude each other"),
        ("--plan auto --tokens-per-microbatch 64", "--tokens-per-microbatch and --plan auto exclude each other"),
        ("--plan auto --colocate-units", "--plan and --colocate-units exclude each other"),
        ("--plan auto --vision-micro-batch-size 2", "--vision-micro-batch-size and --plan auto exclude each other: encoders are"),
        ("--plan auto --num-layers-per-virtual-pipeline-stage 2", "and --plan auto exclude each other: virtual stages are"),
        ("--plan auto --elastic", "--elastic goes by templates for every number of nodes, which --plan auto does not plan"),
        ("--plan auto --replan --plan-review-iters 0", "a plan that a review finds, and --plan-review-iters 0 has none"),
        ("--distributed-timeout-minutes 1e30", "--distributed-timeout-minutes must be at most 30000, found 1e+30"),
        (f"--micro-batch-size {NINES}", "is larger than --global-batch-size 8"),
        (f"--seed {NINES}", "--seed must be at most 4294967295"),
        (
            "--global-batch-size 100000",
            "--global-batch-size 100000 gives a replica of the LLM 100000 microbatches of --micro-batch-size 1 in one step, and "
            "no schedule is made of more than 16384; lower the former, raise the latter or --llm-data-parallel-size",
        ),
    ],
)
def test_combinations_that_cannot_run(parse_on_base: Parse, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_on_base(line)
    assert message in str(problem.value)


def test_transformer_engine_must_be_installed(parse_on_base: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Transformer Engine is not installed"):
        parse_on_base("--transformer-impl transformer_engine")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("megatron.runtime.flags.device_rules._has_cuda", lambda: False)
    with pytest.raises(ConfigError, match="transformer_engine needs a CUDA device; use --transformer-impl local on a CPU"):
        parse_on_base("--transformer-impl transformer_engine")
    monkeypatch.setattr("megatron.runtime.flags.device_rules._has_cuda", lambda: True)
    with pytest.raises(ConfigError, match="has no float64"):
        parse_on_base("--transformer-impl transformer_engine --dtype float64")
    for line in ("", "--lora-rank 8", "--lora-rank 8 --fp8-format e4m3"):
        assert (
            parse_on_base(f"--transformer-impl transformer_engine --bf16 {line}").model.transformer_impl == "transformer_engine"
        )


def test_attention_backends_must_fit_mask_device_and_precision(parse_on_base: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="sequences cannot evaluate --attention-mask embedded; use --attention-backend blocks"):
        parse_on_base("--attention-backend sequences --attention-mask embedded")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("flex", "triton"):
        with pytest.raises(ConfigError, match=f"--attention-backend {name} needs a CUDA device"):
            parse_on_base(f"--attention-backend {name}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        parse_on_base("--attention-backend triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="triton has no float64"):
        parse_on_base("--attention-backend triton --dtype float64")
    assert parse_on_base("--attention-backend triton --attention-mask embedded --bf16").model.attention_mask == "embedded"


def test_context_parallelism_needs_ranks_to_share_blocks(parse_on_base: Parse) -> None:
    for line in ("--context-parallel-distribution ring", "--context-parallel-block-size 64"):
        with pytest.raises(ConfigError, match=f"{line.split()[0]} would be ignored: every unit's context parallel size is 1"):
            parse_on_base(line)
    flags = "--context-parallel-size 2 --vision-cp 2 --context-parallel-distribution ring --context-parallel-block-size 64"
    found = parse_on_base(flags, world_size=4)
    assert found.parallelism.units["language"].context_parallel_size == 2
    assert found.parallelism.context_parallel_distribution == "ring"


def test_tensor_parallel_overlap_needs_ranks_and_braid_s_layers(parse_on_base: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_on_base("--llm-tp 2", world_size=3).parallelism.num_overlapped_parts == 1
    assert parse_on_base("--llm-tp 2 --tp-comm-overlap", world_size=3).parallelism.num_overlapped_parts == 4
    line = "--llm-tp 2 --tp-comm-overlap --tp-comm-overlap-parts"
    assert parse_on_base(f"{line} 3", world_size=3).parallelism.num_overlapped_parts == 3
    with pytest.raises(ConfigError, match="--tp-comm-overlap-parts must be at least 2, found 1"):
        parse_on_base(f"{line} 1", world_size=3)
    with pytest.raises(ConfigError, match="with or without --tp-comm-overlap; leave one of them out"):
        parse_on_base("--llm-tp 2 --tp-comm-overlap --emulate costs.yaml", world_size=3)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("megatron.runtime.flags.device_rules._has_cuda", lambda: True)
    with pytest.raises(ConfigError, match="layers have an overlap of their own, in user buffers that Braid does not set up"):
        parse_on_base("--llm-tp 2 --tp-comm-overlap --transformer-impl transformer_engine", world_size=3)


def test_sharded_weights_need_ranks_that_hold_the_same_ones(parse_on_base: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--data-parallel-sharding-strategy optim_grads_params"
    with pytest.raises(ConfigError, match="would be ignored: no two ranks hold the same weights; raise a unit's data parallel"):
        parse_on_base(flag)
    for sizes, world_size in (("--vision-dp 2", 3), ("--llm-cp 2", 3)):
        assert parse_on_base(f"{flag} {sizes}", world_size=world_size).parallelism.shards_weights
    for name in ("gather-parameters", "reduce-by-layer"):
        with pytest.raises(
            ConfigError, match="once a step, but --data-parallel-sharding-strategy optim_grads_params does whenever"
        ):
            parse_on_base(f"{flag} --vision-dp 2 --schedule-passes split-backward,{name}", world_size=3)
    with pytest.raises(ConfigError, match="--emulate has no weights to gather"):
        parse_on_base(f"{flag} --vision-dp 2 --emulate costs.yaml", world_size=3)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("megatron.runtime.flags.device_rules._has_cuda", lambda: True)
    engine = f"{flag} --vision-dp 2 --transformer-impl transformer_engine"
    assert parse_on_base(engine, world_size=3).parallelism.shards_weights
    with pytest.raises(ConfigError, match="takes a layer's weights away between its forward and its backward"):
        parse_on_base(f"{engine} --fp8-format e4m3", world_size=3)


def test_context_parallelism_needs_a_backend_and_whole_windows(
    tmp_path: Path, parse_on_base: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="whole sequences, which unit 'language' spreads over 2 ranks; use --attention-backend"):
        parse_on_base("--llm-cp 2 --attention-backend sequences", world_size=3)
    image = {"image": {"patch_size": 4, "in_channels": 1, "merge_size": 3}}
    model = yaml.safe_dump({"units": {**UNITS, "vision": {**UNITS["vision"], **image}}}, sort_keys=False)
    (tmp_path / "merging.yaml").write_text(model)
    flags = ["--model", str(tmp_path / "merging.yaml"), *(part for pair in BASE.items() for part in pair), "--vision-cp", "2"]
    with pytest.raises(ConfigError, match="128 would cut what unit 'vision' merges, 9 patches at a time; choose a multiple"):
        parse_arguments(flags, environ={"WORLD_SIZE": "3"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="block-size 48 is no size for --attention-backend triton; choose a power of two"):
        parse_on_base("--llm-cp 2 --attention-backend triton --context-parallel-block-size 48", world_size=3)
    assert parse_arguments([*flags, "--context-parallel-block-size", "144"], environ={"WORLD_SIZE": "3"}).parallelism.units


ONE_UNIT = {"llm": BACKBONE}
NO_ENCODER = {"llm": BACKBONE, "painter": {**ENCODER, "role": "generator", "image": {"patch_size": 4}}}  # it takes no images
OF_ENCODERS = r"would be ignored: it .*, and the model has no encoder; leave it out"


@pytest.mark.parametrize(
    ("units", "line", "message"),
    [
        (ONE_UNIT, "--attention-mask embedded", "--attention-mask would be ignored: the model has one unit"),
        (ONE_UNIT, "--colocate-units", "--colocate-units would be ignored: the model has one unit"),
        (NO_ENCODER, "--llm-dp 1 --attention-mask embedded", OF_ENCODERS),
        (NO_ENCODER, "--llm-dp 1 --balance orchmllm --balance-granularity sample", OF_ENCODERS),
        (NO_ENCODER, "--llm-dp 1 --eval-iters 1 --eval-blank-images", OF_ENCODERS),
    ],
)
def test_what_needs_other_units(parse_on_base: Parse, units: dict[str, Any], line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_on_base(line, units=units, world_size=len(units))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vision=square", r"--unit-costs vision=square: expected UNIT=FORM or UNIT=FORM:W with one of the forms linear, "),
        ("vision", "--unit-costs vision: expected UNIT=FORM"),
        ("vision=padded:x", "--unit-costs vision=padded:x: expected UNIT=FORM"),
        ("vision=linear+quadratic:-1", "give a finite number that is not negative"),
        ("vision=padded vision=linear", "--unit-costs: unit 'vision' is there twice"),
        ("sound=padded", "--unit-costs sound: the model has no such unit; its units are vision, language"),
    ],
)
def test_costs_of_units_are_checked_at_the_start(parse_on_base: Parse, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_on_base(f"--balance orchmllm --unit-costs {words}")
    config = parse_on_base("--balance orchmllm --unit-costs vision=padded-attention:0.5 language=linear")
    assert config.training.declared_costs == {
        "vision": LengthCost(CostForm.PADDED_ATTENTION, 0.5),
        "language": LengthCost(CostForm.LINEAR),
    }


@pytest.mark.parametrize(
    ("folded", "flags"),
    [
        ("orchmllm:granularity=sample,rearrange-nodes", "orchmllm --balance-granularity sample --rearrange-nodes"),
        ("entrain:num-microbatches=effective", "entrain --balance-num-microbatches effective"),
        (
            "orchmllm:costs=vision=padded-attention:0.5,costs=language=linear",
            "orchmllm --unit-costs vision=padded-attention:0.5 language=linear",
        ),
        ("none:", "none"),
    ],
)
def test_options_of_a_balancer_are_its_flags(parse_on_base: Parse, folded: str, flags: str) -> None:
    assert parse_on_base(f"--balance {folded}").training == parse_on_base(f"--balance {flags}").training
    assert parse_on_base(f"--balance={folded}").training == parse_on_base(f"--balance {flags}").training


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--balance orchmllm:granule=item",
            "--balance orchmllm:granule=item: 'granule' is no such option; known are granularity=",
        ),
        ("--balance entrain:merge-encoders=yes", "'merge-encoders' is no such option"),
        ("--balance entrain:num-microbatches", "'num-microbatches' is no such option; known are .*num-microbatches=given, eff"),
        ("--balance disttrain:granularity=sample", "--balance-granularity would be ignored"),
        ("--balance orchmllm:granularity=sample --balance-granularity item", "set the same thing to different values"),
        ("--balance sideways:granularity=sample", "invalid choice: 'sideways'"),
    ],
)
def test_wrong_options_of_a_balancer_are_named(parse_on_base: Parse, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_on_base(flags)


def test_a_predicted_number_of_microbatches_goes_by_durations(parse_on_base: Parse) -> None:
    cluster = Path("examples/clusters/cpu.yaml").resolve()
    assert (
        parse_on_base(f"--balance entrain --balance-num-microbatches predicted --cluster {cluster}").training.cluster == cluster
    )
    with pytest.raises(ConfigError, match="--cluster would be ignored"):
        parse_on_base(f"--balance entrain --balance-num-microbatches effective --cluster {cluster}")


def test_as_many_microbatches_as_a_schedule_may_have_are_taken(parse_on_base: Parse) -> None:
    config = parse_on_base("--global-batch-size 100000 --micro-batch-size 8")
    assert config.training.global_batch_size == 100000


@pytest.mark.parametrize("size", ["tp", "pp", "cp", "dp"])
def test_a_size_beyond_the_processes_is_refused_before_anything_is_built(parse_on_base: Parse, size: str) -> None:
    with pytest.raises((PlanError, ConfigError)):
        parse_on_base(f"--llm-{size} {'9' * 12}")


def test_numbers_outside_their_bounds_are_refused(parse_on_base: Parse) -> None:
    for flag in all_flags():
        outside = {flag.above, flag.below, None if flag.minimum is None else flag.minimum - 1, flag.maximum and 10 * flag.maximum}
        for number in outside - {None}:
            text = f"{number:.0f}" if flag.parse is whole_number else str(number)
            with pytest.raises(ConfigError, match=rf"^{flag.flag} must be .*, found "):
                parse_on_base(f"{flag.flag} {text}")


HARMLESS_WHEN_LARGE = {
    # intervals: what is never due
    *("exit_interval", "eval_interval", "save_interval", "log_interval", "timeline_interval", "keep_last_checkpoints"),
    "save_retain_interval",
    # bounded by rules about two flags: warm-up and decay, microbatch and global batch
    *("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters", "micro_batch_size"),
    "max_image_pixels",  # itself a bound
    "profile_ranks",  # names, not counts
}


def test_every_count_has_an_upper_bound() -> None:
    """No number that is a typing error takes memory or time."""
    assert {flag.name for flag in all_flags() if flag.parse is whole_number and flag.maximum is None} == HARMLESS_WHEN_LARGE


def test_every_replica_needs_a_sample(parse_on_base: Parse) -> None:
    with pytest.raises(
        ConfigError, match=r"--global-batch-size 2 leaves some of the 3 replicas of unit 'language' without a sample"
    ):
        parse_on_base("--global-batch-size 2", world_size=4)
    assert parse_on_base("--global-batch-size 3", world_size=4).training.global_batch_size == 3


@pytest.mark.parametrize(("world_size", "line"), [(4, "--llm-pp 2"), (3, "--vision-dp 3")])
def test_sizes_that_do_not_fit_the_processes(parse_on_base: Parse, world_size: int, line: str) -> None:
    with pytest.raises(PlanError, match=f"of {world_size} processes"):
        parse_on_base(line, world_size=world_size)


def test_freezing_marks_modules_and_projectors(parse_on_base: Parse) -> None:
    config = parse_on_base("--freeze llm --freeze-projector vision")
    graph = choose_trained(ModelGraph.from_file(config.model.model), config.model)
    assert (graph.unit("vision").freeze_module, graph.unit("vision").freeze_projector) == (False, True)
    assert graph.unit("language").freeze_module


def test_adapters_are_added_to_what_the_patterns_match(parse_on_base: Parse) -> None:
    graph = ModelGraph.from_dict({"units": UNITS})

    def adapted(line: str) -> dict[str, tuple[str, ...]]:
        found = choose_trained(graph, parse_on_base(line).model)
        return {unit.name: unit.lora.targets for unit in found.units if unit.lora is not None}

    inside = tuple(f"transformer.{name}" for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    assert adapted("--lora-rank 4") == {"language": inside}
    assert adapted("--lora-rank 4 --lora-targets llm.*")["language"] == (*inside, "head.output_layer")
    assert adapted("--lora-rank 4 --lora-targets *.linear_fc? --freeze llm --lora-alpha 2") == {
        "vision": (*inside[2:], "projector.linear_fc1", "projector.linear_fc2"),
        "language": inside[2:],
    }
    assert adapted("--lora-rank 4 --lora-targets vision.projector linear_qkv") == {
        "vision": ("projector.linear_fc1", "projector.linear_fc2", inside[0]),
        "language": inside[:1],
    }


def test_what_the_model_file_freezes_stays_frozen(parse_on_base: Parse) -> None:
    config = parse_on_base("--freeze-projector vision")
    frozen = ModelGraph.from_dict({"units": {**UNITS, "vision": {**UNITS["vision"], "freeze_module": True}}})
    graph = choose_trained(frozen, config.model)
    assert graph.unit("vision").freeze_module
    assert graph.unit("vision").freeze_projector
    assert not graph.unit("language").freeze_module
