"""Sound: from audio files to the frames from which encoders make tokens."""
