"""A module of Hugging Face's transformers as one layer: images in, the hidden states of their patches out."""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from multimodal.model.inputs.pixels import normalised_patches
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ImageInput, Opaque, Unit


class OpaqueEncoder(torch.nn.Module):
    """Puts patches back into images, and takes the hidden states of patches in their order. Dropout is off."""

    unused: frozenset[str]
    """Parameters that no output depends on, which are never trained."""

    def __init__(self, module: Module, *, described: Opaque, image: ImageInput, unused: frozenset[str]) -> None:
        """unused: by their names in the module."""
        super().__init__()
        self.module, self._image = module, image
        self.unused = frozenset(f"module.{name}" for name in unused)
        self._before, self._after = find_callback(described.before_encoder), find_callback(described.after_encoder)

    def train(self, mode: bool = True) -> "OpaqueEncoder":
        """Leave the module as it is for inference."""
        super().train(mode)
        self.module.eval()
        return self

    def forward(self, patches: Tensor, places: Tensor, image_of_token: Tensor, num_images: int) -> Tensor:
        """patches: [num_tokens, channels x patch_size^2]; places: [num_tokens, 2], negative where a token is no patch.

        image_of_token: [num_tokens], ascending. Returns [num_tokens, 1, hidden_size].
        """
        size, patch = self._image.grid_size, self._image.patch_size
        is_patch = places[:, 0] >= 0
        index = torch.where(is_patch, places[:, 0] * size + places[:, 1], 0)
        values = normalised_patches(patches, self._image).to(next(self.module.parameters()).dtype)
        rows = values.new_zeros((num_images * size**2 + 1, values.shape[1]))  # the last one is of tokens that are no patches
        rows[torch.where(is_patch, image_of_token * size**2 + index, num_images * size**2)] = values
        pixels = rows[:-1].view(num_images, size, size, -1, patch, patch).permute(0, 3, 1, 4, 2, 5)
        pixels = pixels.reshape(num_images, -1, size * patch, size * patch)
        hidden = self._after(self.module(pixel_values=self._before(pixels)).last_hidden_state)
        first_patch = hidden.shape[1] - size**2
        of_token = torch.where(is_patch, index + first_patch, 0)
        found: Tensor = hidden[image_of_token, of_token]
        return found[:, None]


class OpaqueKind(LayerKind):
    """Reads `batch.patches`, `batch.positions` and the lengths of images."""

    takes_hidden = False
    initialises_itself = True

    def build(self, context: LayerContext, index: int) -> OpaqueEncoder:
        """Build the module from its config.json, with values as transformers draws them, alike on all ranks."""
        described, image = context.unit.module, context.unit.image
        assert described is not None and image is not None
        seed = int.from_bytes(hashlib.sha256(context.unit.name.encode()).digest()[:7], "little")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = build_module(context.unit, described)
        unused = find_unused(context.unit, described, image)
        device, dtype = torch.cuda.current_device(), context.options.precision.params_dtype
        return OpaqueEncoder(module.to(device=device, dtype=dtype), described=described, image=image, unused=unused)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Compute all images at once."""
        batch = given.batch
        assert batch.patches is not None
        lengths = torch.tensor(batch.lengths, device=batch.patches.device)
        images = torch.arange(len(lengths), device=lengths.device)
        images = images.repeat_interleave(lengths, output_size=len(batch.patches))
        output: Tensor = layer(batch.patches, batch.positions, images, len(batch.lengths))
        return output

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Images, of the last of which some patches may be missing: it takes as long as a whole one."""
        assert context.unit.image is not None
        size, device = context.unit.image.grid_size, torch.cuda.current_device()
        num_images, rest = divmod(num_tokens, size**2)
        places = torch.cartesian_prod(torch.arange(size, device=device), torch.arange(size, device=device))
        given = {
            "patches": context.random(num_tokens, context.patch_channels),
            "positions": places.repeat(num_images + 1, 1)[:num_tokens],
            "lengths": (size**2,) * num_images + ((rest,) if rest else ()),
        }
        return given, None


def find_callback(name: str | None) -> Callable[[Tensor], Tensor]:
    """Import `package.module:function`; without a name, the function that changes nothing. Raises ModelError."""
    if name is None:
        return lambda values: values
    module, _, function = name.partition(":")
    try:
        found: Callable[[Tensor], Tensor] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ModelError(f"callback {name}: cannot be imported ({problem}); correct it, or put it on PYTHONPATH") from problem
    return found


def build_module(unit: Unit, described: Opaque) -> Module:
    """Build the module; raises ModelError where transformers knows no such class, part or config.json."""
    where = f"unit '{unit.name}', module"
    try:
        import transformers
    except ImportError as problem:
        raise ModelError(f"{where}: needs the package 'transformers'; install it with: pip install 'braid[hf]'") from problem
    if not (Path(described.directory) / "config.json").is_file():
        raise ModelError(f"{where}, directory: there is no config.json in {described.directory}; give the folder of a model")
    name = described.class_name or "AutoModel"
    kind = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and (name == "AutoModel" or issubclass(kind, transformers.PreTrainedModel))
    if kind is None or not is_model:
        raise ModelError(f"{where}, class: transformers {transformers.__version__} has no model '{name}'; correct it")
    try:
        config = getattr(kind, "config_class", None) or transformers.AutoConfig
        read = config.from_pretrained(described.directory)
        module = transformers.AutoModel.from_config(read) if name == "AutoModel" else kind(read)
        part: Module = module.get_submodule(described.part or "")
    except Exception as problem:  # of whatever a config.json may say
        raise ModelError(f"{where}: {name} cannot be built from {described.directory}/config.json ({problem})") from problem
    return part


def find_unused(unit: Unit, described: Opaque, image: ImageInput) -> frozenset[str]:
    """Return the parameters that get no gradient, such as those of poolers; nothing is computed for it.

    Raises ModelError where the module does not do with images what an encoder must.
    """
    where = f"unit '{unit.name}', module"
    before, after = find_callback(described.before_encoder), find_callback(described.after_encoder)
    with torch.device("meta"):
        module = build_module(unit, described).eval()
        pixels = torch.zeros(1, image.in_channels, image.grid_size * image.patch_size, image.grid_size * image.patch_size)
        try:
            hidden = after(module(pixel_values=before(pixels)).last_hidden_state)
        except Exception as problem:
            raise ModelError(f"{where}: does not take images of {tuple(pixels.shape[1:])} ({problem})") from problem
    if hidden.dim() != 3 or hidden.shape[2] != unit.transformer.hidden_size or hidden.shape[1] < image.grid_size**2:
        raise ModelError(
            f"{where}: gives {list(hidden.shape[1:])} for an image, but the unit has {image.grid_size**2} patches of hidden_size "
            f"{unit.transformer.hidden_size}; correct hidden_size, image_size and patch_size"
        )
    hidden.sum().backward()
    return frozenset(name for name, parameter in module.named_parameters() if parameter.grad is None)


def rename_keys(unit: Unit, keys: Iterable[str]) -> Mapping[str, str]:
    """Return the names that a module gives the tensors of a file -> those in the file, which versions of transformers rename."""
    assert unit.module is not None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # older ones do not
        return {key: key for key in keys}
    with torch.device("meta"):
        module = build_module(unit, unit.module)
    renamings = [each for each in get_model_conversion_mapping(module) if isinstance(each, WeightRenaming)]
    return {rename_source_key(key, renamings, [])[0]: key for key in keys}
