"""First layers of encoders: hidden states from patches of images, frames of spectrograms, or outputs of other encoders."""
