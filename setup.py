from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

# Optional: without a C++ compiler Braid still installs and runs the Python reference of every kernel.
kernels = Pybind11Extension(
    "multimodal._kernels",
    sources=sorted(glob("csrc/*.cpp")),
    depends=sorted(glob("csrc/*.h")),
    cxx_std=17,
    extra_compile_args=["-O3"],
    optional=True,
)

setup(ext_modules=[kernels], cmdclass={"build_ext": build_ext})
