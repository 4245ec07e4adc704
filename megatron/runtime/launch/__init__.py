"""The ranks of a run meet, agree to start, fail together and stop together."""
