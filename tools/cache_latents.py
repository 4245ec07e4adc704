"""Encodes the images of a run's data once, for --latent-cache: its generators then learn latents without encoding any.

python tools/cache_latents.py --output DIR <flags of pretrain_mllm.py, as for a run with --plan auto>

The model file names the autoencoder (`latents`).
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.values.errors import ConfigError
from tools.command_line import Parser, count, parser_beside_a_run, program, read_run_flags

if TYPE_CHECKING:
    from torch import Tensor


def build_parser() -> Parser:
    """Return the parser of the tool's own flags."""
    parser = parser_beside_a_run("cache_latents.py", __doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="Where the latents go.")
    parser.add_argument("--images-per-file", type=count, default=4096, metavar="N", help="Images in each file (4096).")
    return parser


@program("cache_latents.py")
def main(argv: Sequence[str]) -> None:
    """Encode what the run's generators make; raises BraidError."""
    given, config, graph = read_run_flags(build_parser(), argv)
    import torch  # behind the flags, as it takes seconds

    from megatron.runtime.feed.data_sets import latent_images, open_manifest, text_settings
    from multimodal.data.image_processing import patch_positions
    from multimodal.data.index.item_reader import latent_key
    from multimodal.hugging_face.architecture import autoencoder_digest
    from multimodal.model.latents import encode_image, join_patches, normalised_patches

    images, device = latent_images(graph), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not images:
        raise ConfigError("--model: no generator of it makes latents; give one `latents` in its image")
    if config.data.sample_program is not None:
        raise ConfigError("--data-path: a program's samples (digits, FILE.py) are not cached; use a manifest")
    given.output.mkdir(parents=True, exist_ok=True)
    tokenizer, chat = text_settings(config).open()
    writers = {name: _Writer(given.output, autoencoder_digest(image), given.images_per_file) for name, image in images.items()}
    for path in dict.fromkeys(named.path for named in (*config.data.mixture, *config.evaluation.valid_sets.values())):
        source = open_manifest(path, config=config, graph=graph, tokenizer=tokenizer, chat=chat)
        for index in range(len(source)):
            for item_index, item in enumerate(source.lengths(index).items):
                if item.unit not in images:
                    continue
                image, wanted = images[item.unit], source.wanted(index, item_index)
                name, found = latent_key(wanted.item, image, data_path=path), source.item(index, item_index)
                if name not in writers[item.unit].names:
                    places = torch.from_numpy(patch_positions(found.grid, merge_size=image.merge_size))
                    patches = normalised_patches(torch.from_numpy(found.patches), image)
                    pixels = join_patches(patches, places, found.grid[:2], channels=image.in_channels)
                    writers[item.unit].add(name, encode_image(pixels.to(device), image).cpu())
    for name, writer in writers.items():
        writer.flush()
        print(f"{given.output}: {len(writer.names)} images of unit '{name}'")


class _Writer:
    """Writes files of latents that one autoencoder made."""

    def __init__(self, folder: Path, digest: str, images_per_file: int) -> None:
        self._folder, self._digest, self._most = folder, digest, images_per_file
        self._held: dict[str, Tensor] = {}
        self._num_files = 0
        self.names: set[str] = set()

    def add(self, name: str, latents: "Tensor") -> None:
        """Keep an image's latents for the next file."""
        self.names.add(name)
        self._held[name] = latents.contiguous()
        if len(self._held) == self._most:
            self.flush()

    def flush(self) -> None:
        """Write what is held; the file appears when it is complete."""
        from safetensors.torch import save_file

        from multimodal.data.index.item_reader import DIGEST

        if self._held:
            path = self._folder / f"{self._digest[:8]}-{self._num_files:05d}.safetensors"
            save_file(self._held, path.with_suffix(".part"), metadata={DIGEST: self._digest})
            path.with_suffix(".part").rename(path)
            self._num_files, self._held = self._num_files + 1, {}


if __name__ == "__main__":
    sys.exit(main())
