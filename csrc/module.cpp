// The Python module multimodal._kernels: one line per kernel. No torch, so one build serves every torch version.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "longest_first_partition.h"

namespace py = pybind11;

PYBIND11_MODULE(_kernels, module) {
    module.doc() = "C++ kernels of Braid's decisions; each has a Python reference of the same name.";

    // Integers first: their sums are exact, and pybind11 never turns a float into an integer.
    module.def("partition_longest_first", &braid::partition_longest_first<std::int64_t>, py::arg("costs"), py::kw_only(),
               py::arg("num_bins"), py::arg("max_items_per_bin"), py::call_guard<py::gil_scoped_release>());
    module.def("partition_longest_first", &braid::partition_longest_first<double>, py::arg("costs"), py::kw_only(),
               py::arg("num_bins"), py::arg("max_items_per_bin"), py::call_guard<py::gil_scoped_release>());
}
