"""First layers of encoders: hidden states of patches of images, of frames of spectrograms, of what other encoders give."""
