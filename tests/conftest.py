"""Settings that every test relies on."""

import os

# Before torch is imported anywhere: with more threads, processes forked from this one hang after a backward in the parent.
os.environ["OMP_NUM_THREADS"] = "1"
