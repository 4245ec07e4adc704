"""An encoder whose layers are a module of Hugging Face's transformers, as it is."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Opaque:
    """The module. It is one layer: no plan cuts it, and its backward is one piece."""

    directory: str
    """A folder with the config.json that it is built from; in a model file relative to that, too. Nothing in it is executed."""
    class_name: str | None = field(default=None, metadata={"key": "class"})
    """A class of transformers, such as CLIPVisionModel; None: the one that AutoModel takes for config.json."""
    part: str | None = None
    """The submodule to take, such as `vision_model`; None: all of it."""
    before_encoder: str | None = None
    """A function `package.module:function` of the images, [num_images, channels, height, width], or of one clip, [1, samples] or
    [1, num_mel_bins, frames], which returns what the module takes instead. Runs import it only where that is allowed."""
    after_encoder: str | None = None
    """The same of the module's hidden states, [num_images, num_tokens, hidden_size]; the last tokens must be the patches,
    or the first ones those of the clip."""
    after_projector: str | None = None
    """The same of the projector's output, [num_tokens, hidden_size of the LLM]."""

    @property
    def callbacks(self) -> tuple[str, ...]:
        """The functions that there are."""
        return tuple(each for each in (self.before_encoder, self.after_encoder, self.after_projector) if each is not None)
