"""Real lengths that stand for the papers' data sets, which are not public as lengths."""

from pathlib import Path

from multimodal.data.length_table import read_length_table
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths

IMAGES = ("coco_llava_descriptions", "chartqa_augmented", "mathvision", "coco_caption_val2017")
SPEECH = ("librispeech_dev_test_clean", "common_voice_twi")


def read_lengths(folder: Path, name: str, *, graph: ModelGraph) -> tuple[SampleLengths, ...]:
    """Read one file of the folder."""
    return read_length_table(folder / f"{name}.csv.gz", graph=graph)


def is_complete(folder: Path) -> bool:
    """Return True if the folder has all files."""
    return all((folder / f"{name}.csv.gz").is_file() for name in (*IMAGES, *SPEECH))
