"""Settings that every test relies on."""

import os

from hypothesis import settings

# Before torch is imported anywhere: with more threads, processes forked from this one hang after a backward in the parent.
os.environ["OMP_NUM_THREADS"] = "1"

# Before Triton is imported anywhere: without a GPU its kernels run in its interpreter. Libraries import it on their own.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

# No deadline an example: on a busy machine the first one, which imports and compiles, takes longer than any sensible one.
settings.register_profile("braid", deadline=None)
settings.load_profile("braid")
