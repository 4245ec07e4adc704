"""Which node gets which balanced batch, so that little of its data crosses nodes (OrchMLLM, Alg. 3)."""
