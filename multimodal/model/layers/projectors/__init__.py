"""Last layers of encoders: hidden states to the rows that the LLM takes."""
