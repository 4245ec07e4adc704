import os
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# Optional: without a C++ compiler Braid still installs, and runs Python references of the kernels that most runs need.
kernels = Pybind11Extension(
    "multimodal._kernels",
    # The one that takes longest first, beside all others.
    sources=["csrc/module.cpp", *sorted({*glob("csrc/*.cpp")} - {"csrc/module.cpp"})],
    depends=sorted(glob("csrc/*.h")),
    cxx_std=17,
    # No fused multiply-add: results must be those of the Python references, bit for bit, on every processor.
    extra_compile_args=["-O3", "-ffp-contract=off"],
    optional=True,
)

ParallelCompile(default=min(8, os.cpu_count() or 1)).install()
setup(ext_modules=[kernels], cmdclass={"build_ext": build_ext})
