"""An encoder's first layer for sound: two convolutions of width 3, of which the second halves the frames (Whisper)."""

from multimodal.cost.layers.layer import LayerFlops
from multimodal.cost.layers.patch_embedding import PatchEmbeddingLayer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Unit


class AudioEmbeddingLayer(PatchEmbeddingLayer):
    """Turns a spectrogram into hidden states. Planned and simulated; multimodal/model does not build it yet."""

    @classmethod
    def fits(cls, unit: Unit) -> bool:
        """True if the unit takes sound."""
        return unit.audio is not None

    @property
    def num_weights(self) -> int:
        """Both convolutions."""
        hidden = self.unit.transformer.hidden_size
        return 3 * hidden * (self._num_mel_bins + hidden)

    @property
    def num_vector_entries(self) -> int:
        """The bias of each convolution."""
        return 2 * self.unit.transformer.hidden_size

    @property
    def can_be_built(self) -> bool:
        """False."""
        return False

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """The first convolution sees two frames per token."""
        weights = self.num_weights + 3 * self.unit.transformer.hidden_size * self._num_mel_bins
        return LayerFlops(2.0 * load.num_tokens * weights)

    @property
    def _num_mel_bins(self) -> int:
        assert self.unit.audio is not None, f"unit '{self.unit.name}' has no audio"
        return self.unit.audio.num_mel_bins
