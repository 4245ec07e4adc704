"""An encoder whose layers are an unchanged module of Hugging Face's transformers."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Opaque:
    """The module. It counts as one layer: no plan cuts it, and its backward is one piece."""

    directory: str
    """The folder with the config.json that it is built from, relative to the model file if in one. Nothing in it is executed."""
    class_name: str | None = field(default=None, metadata={"key": "class"})
    """A class of transformers, such as CLIPVisionModel; None: the class that AutoModel chooses for config.json."""
    part: str | None = None
    """The submodule to take, such as `vision_model`; None: all of it."""
    before_encoder: str | None = None
    """A function `package.module:function` of the images, [num_images, channels, height, width], or of one clip, [1, samples] or
    [1, num_mel_bins, frames], that returns the module's input. Runs import it only if that is allowed."""
    after_encoder: str | None = None
    """The same for the module's hidden states, [num_images, num_tokens, hidden_size]; the last tokens of its result must be the
    patches, or the first ones those of the clip."""
    after_projector: str | None = None
    """The same for the projector's output, [num_tokens, hidden_size of the LLM]."""

    @property
    def callbacks(self) -> tuple[str, ...]:
        """The names of all callbacks that are set."""
        return tuple(each for each in (self.before_encoder, self.after_encoder, self.after_projector) if each is not None)
