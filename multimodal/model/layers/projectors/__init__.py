"""Last layers of encoders: from hidden states to the rows that the LLM takes."""
