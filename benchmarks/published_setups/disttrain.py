"""DistTrain: MLLM-9B, 15B and 72B on up to 1,296 A800, global batch 1,920; DistTrain against Megatron-LM.

What the paper states: sequences of 8,192 tokens, microbatches of one; Megatron-LM with TP 8, 1, 2 and 10 stages for the LLM and
one more each for the encoder and the generator; 1,172 GPUs for the 72B model. How many images a sequence has is shown in a figure
only: here seven of 512 x 512 pixels (1,024 tokens each, which nearly fills it), all alike, and as many are made, by the 72B model
with 1024 x 1024 pixels. So there is nothing to reorder, and what is compared is the allocation of GPUs.
"""

from collections.abc import Iterator

from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from benchmarks.published_setups.rows import Row, single
from multimodal.cost.calibrate_compute import calibrate_compute
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

BATCH_SIZE, SEQUENCE_LENGTH, NUM_IMAGES, IMAGE_TOKENS = 1920, 8192, 7, 1024
CALIBRATED_MFU, SMALLEST_MFU = 0.547, 0.518
LARGE_RATIO = 1.2
LARGE = "mllm-72b"
SMALL = {"mllm-15b": (2, 1.7), "mllm-9b": (1, 2.8)}
"""Model -> stages of its LLM under Megatron-LM, MFU over Megatron-LM's. Published is 1.7 to 2.8 for both together; the smaller
LLM leaves more of Megatron-LM's GPUs idle."""


def rows() -> Iterator[Row]:
    """Calibrate on DistTrain's MFU with the 72B model; predict its other MFUs, and its gains over Megatron-LM."""
    source = "abstract, 72B on 1,172 GPUs"
    found = _disttrain(LARGE, num_gpus=1172)
    given = read_cluster("a800")
    run = found.plan(given)
    before = found.predict(run, given)
    seconds = before.iteration_seconds * before.mfu / CALIBRATED_MFU
    cluster = calibrate_compute(
        given, predict_seconds=lambda each: found.predict(run, each).iteration_seconds, measured_seconds=seconds
    )
    large = found.predict(run, cluster).mfu
    speed = cluster.efficiency / given.efficiency
    yield Row("DistTrain", "72B, MFU", single(CALIBRATED_MFU), large, source, "share", calibrated_speed=speed)
    megatron = _megatron(LARGE, llm_stages=10, num_gpus=1172).simulate(cluster).mfu
    source = "section 7.1"
    yield Row("DistTrain", "72B, MFU over Megatron-LM's", single(LARGE_RATIO), large / megatron, source)
    mfus = {}
    for model, (llm_stages, ratio) in SMALL.items():
        mfus[model] = _disttrain(model, num_gpus=1296).simulate(cluster).mfu
        baseline = _megatron(model, llm_stages=llm_stages, num_gpus=1296).simulate(cluster).mfu
        yield Row("DistTrain", f"{model[5:].upper()}, MFU over Megatron-LM's", single(ratio), mfus[model] / baseline, source)
    yield Row("DistTrain", "smallest MFU of the three", single(SMALLEST_MFU), min(large, *mfus.values()), source, "share")


def _disttrain(model: str, *, num_gpus: int) -> Setup:
    return Setup("disttrain", read_model(model), (_sample(model),), num_gpus, BATCH_SIZE, {})


def _megatron(model: str, *, llm_stages: int, num_gpus: int) -> Setup:
    sizes = {"vision": FixedSizes(8, 1), "llm": FixedSizes(8, llm_stages), "generator": FixedSizes(8, 1)}
    return Setup("megatron", read_model(model), (_sample(model),), num_gpus, BATCH_SIZE, sizes)


def _sample(model: str) -> SampleLengths:
    generator = read_model(model).unit("generator").image
    assert generator is not None
    made = ((1024 if model == LARGE else 512) // generator.patch_size) ** 2
    images = [ItemLengths("vision", IMAGE_TOKENS, IMAGE_TOKENS)] * NUM_IMAGES
    num_text_tokens = SEQUENCE_LENGTH - NUM_IMAGES * IMAGE_TOKENS
    return SampleLengths(0, (*images, *[ItemLengths("generator", made, 0)] * NUM_IMAGES), num_text_tokens, num_text_tokens)
