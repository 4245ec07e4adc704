"""Models of Hugging Face: their config.json as model graphs and back, and the names of their weights; without torch."""
