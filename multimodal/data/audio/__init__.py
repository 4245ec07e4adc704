"""Sound: from WAV files to the frames of which encoders make tokens."""
