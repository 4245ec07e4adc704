"""Images or audio clips, as an encoder takes them or a generator makes them."""

import math
from dataclasses import dataclass, field
from typing import Literal

from multimodal.values.typed_reader import up_to
from multimodal.values.units.transformer import MOST_LAYERS

Grid = tuple[int, int] | tuple[int, int, int]
"""(rows, columns) of patches; of a step of a video whose steps follow each other also its time, in rotary positions of the LLM
from the video's first step. Of a clip (frames, 1), or (samples, 1)."""


@dataclass(frozen=True)
class Latents:
    """The frozen autoencoder (VAE) of a latent diffusion model, whose latents of images a generator makes, not their pixels."""

    directory: str
    """A folder of diffusers' `AutoencoderKL`, relative to the model file if in one."""
    channels: int = field(default=4, metadata=up_to(2**10))
    """Numbers of one latent."""
    factor: int = field(default=8, metadata=up_to(2**10))
    """Pixels of both sides that one latent stands for."""
    is_cached: bool = False
    """Latents come from --latent-cache, which sets this: costs then count no encoding."""


@dataclass(frozen=True)
class VideoInput:
    """The rule by which a video becomes steps: as many frames as a patch covers, cut into patches together (Qwen2-VL)."""

    min_pixels: int = field(default=100352, metadata=up_to(2**31))
    max_pixels: int = field(default=602112, metadata=up_to(2**31))
    """Bounds of a frame's pixels, or, with timestamps, of those of all frames together."""
    max_tokens: int | None = field(default=None, metadata=up_to(2**31))
    """A further bound, in tokens of merge_size x merge_size patches: with timestamps of a frame's pixels; else nine tenths of it
    bound those of all steps together. None: none."""
    has_timestamps: bool = False
    """Every step stands alone in the text, behind its time (Qwen3-VL); False: steps follow each other, and their times are those
    of the LLM's rotary positions."""
    tokens_per_second: int | None = field(default=None, metadata=up_to(2**20))
    """Rotary positions of a second (Qwen2.5-VL); None: a step is one position behind the step before."""
    ends_at_last_time: bool = False
    """Text behind a video continues behind its last step's time, too; False: behind its rows and columns alone, as for images."""


@dataclass(frozen=True)
class ImageInput:
    """The rule that cuts an image into tokens: native resolution (Qwen2-VL: sizes rounded, area bounded), or one size for all."""

    patch_size: int = field(default=14, metadata=up_to(2**10))
    merge_size: int = field(default=2, metadata=up_to(2**6))
    """Neighbouring patches, merge_size x merge_size, leave the projector as one token; sizes are multiples of patch x merge."""
    in_channels: int = field(default=3, metadata=up_to(2**10))
    min_pixels: int = field(default=3136, metadata=up_to(2**31))
    max_pixels: int = field(default=1003520, metadata=up_to(2**31))
    image_size: int | None = field(default=None, metadata=up_to(2**14))
    """Pixels of both sides to which every image is brought; None: native resolution, within the bounds above. What is no whole
    patch on the right and at the bottom is cut off (SigLIP: 384 pixels, patches of 14)."""
    longest_side: int | None = field(default=None, metadata=up_to(2**14))
    """Native resolution: larger images are scaled until their longer side has so many pixels, and both sides are made whole
    patches, rounded up (Pixtral); None: within the bounds above."""
    fit: Literal["stretch", "crop"] = "stretch"
    """Images of one size. stretch: both sides are scaled independently; crop: the shorter side is scaled, the longer one cut."""
    shorter_side: int | None = field(default=None, metadata=up_to(2**14))
    """For fit crop: pixels that the shorter side is scaled to before both sides are cut; None: `image_size`."""
    max_tiles: int = field(default=1, metadata=up_to(2**10))
    """For images of one size: the most tiles of that size that a larger image is cut into, each an item of its own (InternVL's
    rule); the whole image follows as one more item."""
    mean: tuple[float, ...] = field(default=(0.5,), metadata={"min_entries": 1})
    """Subtracted from pixel values between 0 and 1: one number, or one for each channel."""
    std: tuple[float, ...] = field(default=(0.5,), metadata={"min_entries": 1, "above": 0})
    """Pixel values are then divided by it: one number, or one for each channel."""
    class_token: Literal["dropped", "kept"] | None = None
    """An additional token for every image: dropped (behind the patches, not in the output) or kept (before them, part of it)."""
    num_registers: int = field(default=0, metadata={"minimum": 0, "maximum": 2**10})
    """Additional tokens without positions behind the class token, kept or dropped with it (DINOv2 with registers)."""
    has_patch_bias: bool = True
    """Encoders: the patch embedding has a bias."""
    has_pre_norm: bool = False
    """Encoders: a norm follows the embedding of patches and learned positions, if there are any (CLIP, Pixtral)."""
    has_row_ends: bool = False
    """Encoders of images at native resolution: in the LLM a token of the text stands behind every row of patches (Pixtral)."""
    num_frames: int = field(default=1, metadata=up_to(2**10))
    """Frames that a patch covers; an image is repeated in all of them."""
    video: VideoInput | None = None
    """Encoders: videos are seen as steps of so many frames; None: each of their frames is an image."""
    window_size: int | None = field(default=None, metadata=up_to(2**14))
    """Encoders: pixels of both sides of the windows in which patches attend; None: patches attend to the whole image."""
    position_grid: int | None = field(default=None, metadata=up_to(2**10))
    """Encoders: both sides of a square of learned positions, which is interpolated to every image's patches: linearly with
    aligned corners at native resolution (Qwen3-VL), cubically for images of one size (DINOv2). None: no learned positions at
    native resolution, one for each patch for images of one size."""
    deepstack_layers: tuple[int, ...] = field(default=(), metadata={"minimum": 0, "maximum": MOST_LAYERS - 1})
    """Encoders: transformer layers, counted from 0, whose output also goes to the LLM: each through a projector of its own, and
    added behind one of the LLM's first transformer layers (Qwen3-VL)."""
    full_attention_layers: tuple[int, ...] = field(default=(), metadata={"minimum": 0, "maximum": MOST_LAYERS - 1})
    """Encoders with windows: transformer layers, counted from 0, in which patches attend to the whole image."""
    latents: Latents | None = None
    """Generators: what patches are made of; None: pixels."""
    num_mel_bins: int | None = field(default=None, metadata=up_to(2**10))
    """Generators of sound: it is an image of its spectrogram, a row for each of so many bands of the mel scale and a column for
    every 10 ms; None: images."""

    @property
    def num_patch_values(self) -> int:
        """Numbers of one patch."""
        if self.latents is not None:
            return self.num_made_channels * (self.patch_size // self.latents.factor) ** 2
        return self.num_pixel_values

    @property
    def num_made_channels(self) -> int:
        """Channels of the images that a generator makes: of latents, if patches are made of these, else of pixels."""
        return self.in_channels if self.latents is None else self.latents.channels

    @property
    def num_pixel_values(self) -> int:
        """Numbers of one patch of pixels."""
        return self.in_channels * self.num_frames * self.patch_size**2

    @property
    def window_patches(self) -> int:
        """Patches of both sides of a window, a multiple of merge_size."""
        assert self.window_size is not None, "patches attend to the whole image"
        return self.window_size // self.patch_size // self.merge_size * self.merge_size

    @property
    def grid_size(self) -> int:
        """Patches of both sides of images of one size."""
        assert self.image_size is not None, "images have sizes of their own"
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        """Number of learned positions of images of one size: those of the patches, and before them that of the class token."""
        return (self.position_grid or self.grid_size) ** 2 + (self.class_token is not None)

    @property
    def num_class_tokens(self) -> int:
        """Number of an image's tokens that are not patches: class token and registers."""
        return 0 if self.class_token is None else 1 + self.num_registers

    def num_tokens(self, grid: Grid) -> int:
        """Tokens inside an encoder of an image with these (rows, columns) of patches."""
        return grid[0] * grid[1] + self.num_class_tokens

    def num_output_tokens(self, grid: Grid) -> int:
        """Tokens that leave the encoder, and of the text those that end rows."""
        kept = self.num_class_tokens * (self.class_token == "kept")
        return grid[0] * grid[1] // self.merge_size**2 + kept + grid[0] * self.has_row_ends

    @property
    def merge_factor(self) -> int:
        """Neighbouring tokens that leave an encoder's projector as one."""
        return self.merge_size**2

    @property
    def tokens_per_window(self) -> int | None:
        """Tokens of a full window; None: tokens attend to the whole image."""
        return None if self.window_size is None else self.window_patches**2


FRAMES_PER_TOKEN = 5
"""Frames of a spectrogram from which a token is made: two convolutions of width 3, the second with stride 2."""


@dataclass(frozen=True)
class Waveform:
    """Sound as samples at 16 kHz, which convolutions of a module turn into tokens (wav2vec 2.0)."""

    widths: tuple[int, ...] = field(metadata={**up_to(2**10), "min_entries": 1})
    """Widths of the convolutions, first to last."""
    steps: tuple[int, ...] = field(metadata={**up_to(2**10), "min_entries": 1})
    """Strides of the convolutions, first to last; their product is the number of samples from one token to the next."""
    channels: int = field(default=512, metadata=up_to(2**20))
    """Output channels of every convolution; for costs."""
    is_normalised: bool = False
    """Clips are normalised to mean 0 and variance 1."""

    @property
    def samples_per_token(self) -> int:
        """Samples from one token to the next."""
        return math.prod(self.steps)

    @property
    def samples_seen(self) -> int:
        """Number of samples from which a token is made."""
        return 1 + sum((width - 1) * math.prod(self.steps[:index]) for index, width in enumerate(self.widths))


@dataclass(frozen=True)
class AudioInput:
    """The rule that turns sound into tokens (Whisper: a spectrogram, two convolutions of width 3, the second with stride 2).

    The grid of a clip is (frames of its spectrogram, 1), or (samples, 1) if the encoder takes samples.
    """

    num_mel_bins: int = field(default=128, metadata=up_to(2**16))
    tokens_per_second: int = field(default=50, metadata=up_to(2**20))
    """Tokens per second inside the encoder; the spectrogram has twice as many frames."""
    merge_factor: int = field(default=2, metadata=up_to(2**10))
    """Neighbouring tokens that the projector merges into one; a remainder at the end of a clip is left out of the output."""
    merge: Literal["joined", "averaged"] = "joined"
    """Merged tokens are concatenated (joined) or averaged (Qwen2-Audio)."""
    max_tokens: int = field(default=1500, metadata=up_to(2**24))
    """Tokens of the longest clip; also the number of learned positions, unless clips are cut into chunks."""
    chunk_tokens: int | None = field(default=None, metadata=up_to(2**24))
    """Clips are cut into chunks of this many tokens (Qwen2.5-Omni): convolutions and attention stay within a chunk, and
    positions, which are sines and cosines, restart in each; None: tokens attend to the whole clip."""
    waveform: Waveform | None = None
    """Modules of transformers that take samples, not a spectrogram; a remainder behind the last whole token is cut off."""

    @property
    def num_patch_values(self) -> int:
        """Number of input values from which a token is made."""
        return FRAMES_PER_TOKEN * self.num_mel_bins if self.waveform is None else self.waveform.samples_seen

    @property
    def tokens_per_window(self) -> int | None:
        """Tokens of a full chunk; None: tokens attend to the whole clip."""
        return self.chunk_tokens

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return 0 if self.chunk_tokens is not None else self.max_tokens

    def num_tokens(self, grid: Grid) -> int:
        """Tokens inside an encoder of a clip of this many frames, or samples."""
        if self.waveform is not None:
            return max(0, (grid[0] - self.waveform.samples_seen) // self.waveform.samples_per_token + 1)
        return (grid[0] - 1) // 2 + 1

    def num_output_tokens(self, grid: Grid) -> int:
        """Tokens that leave the encoder."""
        return self.num_tokens(grid) // self.merge_factor


ItemInput = ImageInput | AudioInput
"""Description of the items that an encoder takes or a generator makes."""


def problem_of_image(image: ImageInput) -> str:
    """Describe a contradiction in a description of images; empty if there is none."""
    if image.max_pixels < image.min_pixels:
        return f"max_pixels {image.max_pixels} is below min_pixels {image.min_pixels}; raise max_pixels"
    factor = image.patch_size * image.merge_size
    if image.image_size is not None and (not image.grid_size or image.grid_size % image.merge_size):
        return (
            f"image_size {image.image_size} holds {image.grid_size} patches of patch_size {image.patch_size} a side, no "
            f"multiple of merge_size {image.merge_size}; change one of them"
        )
    is_native = image.image_size is None and image.position_grid is None
    if (image.has_row_ends or image.longest_side) and not (is_native and image.merge_size == 1 and image.class_token is None):
        return (
            "has_row_ends and longest_side are for images at native resolution, with merge_size 1 and without class_token and "
            "position_grid; correct these, or leave them out"
        )
    if image.max_tiles > 1 and (image.image_size is None or image.fit != "stretch"):
        return f"max_tiles {image.max_tiles} is for images of one size (image_size) with fit stretch; set these, or leave it out"
    for name, values in (("mean", image.mean), ("std", image.std)):
        if len(values) not in (1, image.in_channels):
            return f"{name} has {len(values)} numbers, expected 1 or one for each of in_channels {image.in_channels}; correct it"
    if image.window_size is not None and (image.window_patches == 0 or image.class_token is not None):
        return (
            f"window_size {image.window_size} must be at least patch_size x merge_size = {factor}, and images have no "
            "class_token; correct it, or leave it out"
        )
    if image.num_registers and (image.class_token is None or image.image_size is None):
        return "num_registers come with a class_token, in images of one size; give class_token and image_size, or leave it out"
    if image.latents is not None and (image.patch_size % image.latents.factor or image.num_frames > 1):
        return (
            f"patch_size {image.patch_size} holds no whole number of latents, each of {image.latents.factor} pixels a side; make "
            "it a multiple, with num_frames 1"
        )
    is_flat = image.in_channels == image.num_frames == 1 and image.image_size is image.longest_side is None
    if image.num_mel_bins is not None and (image.num_mel_bins % factor or not is_flat):
        return (
            f"num_mel_bins {image.num_mel_bins} must be a multiple of patch_size x merge_size = {factor}, with in_channels 1, "
            "num_frames 1 and without image_size and longest_side; correct these, or leave it out"
        )
    if image.video is not None and (image.image_size is not None or image.longest_side is not None):
        return "video is for images at native resolution, within min_pixels and max_pixels; leave it out"
    is_cut = image.image_size is not None and image.fit == "crop"
    if image.shorter_side is not None and not (is_cut and image.shorter_side >= (image.image_size or 0)):
        return f"shorter_side {image.shorter_side} is for images that are cut, at least image_size; set fit: crop or leave it out"
    if list(image.deepstack_layers) != sorted(set(image.deepstack_layers)):
        return f"deepstack_layers {list(image.deepstack_layers)} must increase; correct them"
    if image.class_token == "kept" and image.merge_size > 1:
        return "class_token kept is a token that nothing can be merged with; use merge_size 1, or class_token dropped"
    return ""


def problem_of_waveform(waveform: Waveform) -> str:
    """Describe a contradiction in a description of samples; empty if there is none."""
    if len(waveform.widths) != len(waveform.steps):
        return f"widths has {len(waveform.widths)} numbers and steps {len(waveform.steps)}, expected one of each convolution"
    if waveform.samples_seen < waveform.samples_per_token:
        return f"a token sees {waveform.samples_seen} samples of {waveform.samples_per_token}; correct widths or steps"
    return ""
