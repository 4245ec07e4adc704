"""What a run trains on and in which order, as its checkpoints remember it: a resumed run must go on with the same."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.runtime.feed.data_sets import DIGITS, DataSets
from megatron.runtime.flags.configuration import RunConfig
from multimodal.values.errors import CheckpointError

RunData = Mapping[str, Any]
"""Plain values, as they stand in a checkpoint."""


class _Compared(NamedTuple):
    """One thing that must be the same."""

    name: str
    flag: str
    shown: str = ""
    """What messages show of it, if not itself."""
    unit: str = ""


_COMPARED = (
    _Compared("seed", "--seed"),
    _Compared("global_batch_size", "--global-batch-size"),
    _Compared("data_digest", "--data-path", shown="data_path"),
    _Compared("digits_samples", "--digits-samples"),
    _Compared("split", "--split"),
    _Compared("seq_length", "--seq-length"),
    _Compared("tokenizer_type", "--tokenizer-type"),
    _Compared("tokenizer_digest", "--tokenizer-model", shown="tokenizer_model"),
    _Compared("attention_mask", "--attention-mask"),
    _Compared("num_train_samples", "--data-path", unit="training samples"),
)
"""In the order in which differences are told: the last follows from those before it, unless image files changed."""


def describe_data(config: RunConfig, data: DataSets) -> RunData:
    """What is remembered; O(bytes of the manifest). Raises OSError.

    Files count by their content, so that they may move.
    """
    is_digits = config.data.data_path == DIGITS
    manifest, model = Path(config.data.data_path), config.data.tokenizer_model
    return {
        "seed": config.training.seed,
        "global_batch_size": config.training.global_batch_size,
        "data_path": config.data.data_path,
        "data_digest": DIGITS if is_digits else _digest(manifest, inside="manifest.jsonl"),
        "digits_samples": config.data.digits_samples if is_digits else None,
        "split": None if is_digits else config.data.split,
        "seq_length": config.data.seq_length,
        "tokenizer_type": config.data.tokenizer_type,
        "tokenizer_model": model,
        "tokenizer_digest": _digest(Path(model), inside="tokenizer.json") if model else None,
        "attention_mask": config.model.attention_mask,
        "num_train_samples": len(data.train),
    }


def check_same_data(where: str, *, saved: RunData, current: RunData) -> None:
    """Raise CheckpointError with the first difference that would make a resumed run go on otherwise than it was.

    where: names the checkpoint. What only one of the two knows is not compared.
    """
    for name, flag, shown, unit in _COMPARED:
        if name not in saved or saved[name] == current[name]:
            continue
        before, now = (_show(data, name, shown, unit) for data in (saved, current))
        raise CheckpointError(
            f"{where}: it was trained with {flag} {before}, this run has {now}, so the data would not go on as it was; use "
            f"{flag} {before}, or start another run from its weights alone: --finetune, with a --save of its own"
        )


def _show(data: RunData, name: str, shown: str, unit: str) -> str:
    if shown:
        return f"{data.get(shown)} (content {str(data[name])[:12]})"
    return f"{data[name]} {unit}".strip()


def _digest(path: Path, *, inside: str) -> str:
    """Of a file, or of the file `inside` a folder."""
    with open(path / inside if path.is_dir() else path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
