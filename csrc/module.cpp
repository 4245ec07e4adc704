// The Python module multimodal._kernels: one line per kernel. No torch, so one build serves every torch version.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "longest_first_partition.h"
#include "simulate_events.h"

namespace py = pybind11;

namespace {

template <typename Value>
using Array = py::array_t<Value, py::array::c_style | py::array::forcecast>;

template <typename Value>
braid::View<Value> view(const Array<Value>& array) {
    return {array.data(), static_cast<std::int64_t>(array.size())};
}

template <typename Value>
py::array_t<Value> to_array(const std::vector<Value>& values) {
    return py::array_t<Value>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::tuple simulate_events(const Array<std::int64_t>& lane_starts, const Array<std::int64_t>& lane_nodes,
                          const Array<std::uint8_t>& lane_fillers, const Array<std::uint8_t>& kinds,
                          const Array<std::int64_t>& need_starts, const Array<std::int64_t>& needs,
                          const Array<std::int64_t>& receiver_starts, const Array<std::int64_t>& receivers,
                          const Array<double>& seconds, const Array<double>& latency_seconds, const Array<std::int64_t>& links,
                          std::int64_t num_links) {
    const braid::EventArrays arrays{view(lane_starts), view(lane_nodes), view(lane_fillers),    view(kinds),
                                    view(need_starts), view(needs),      view(receiver_starts), view(receivers),
                                    view(seconds),     view(latency_seconds), view(links),      num_links};
    braid::EventTimes times;
    {
        py::gil_scoped_release release;
        times = braid::simulate_events(arrays);
    }
    return py::make_tuple(to_array(times.start_seconds), to_array(times.end_seconds), to_array(times.positions));
}

}  // namespace

PYBIND11_MODULE(_kernels, module) {
    module.doc() = "C++ kernels of Braid's decisions; each has a Python reference of the same name.";

    // Integers first: their sums are exact, and pybind11 never turns a float into an integer.
    module.def("partition_longest_first", &braid::partition_longest_first<std::int64_t>, py::arg("costs"), py::kw_only(),
               py::arg("num_bins"), py::arg("max_items_per_bin"), py::call_guard<py::gil_scoped_release>());
    module.def("partition_longest_first", &braid::partition_longest_first<double>, py::arg("costs"), py::kw_only(),
               py::arg("num_bins"), py::arg("max_items_per_bin"), py::call_guard<py::gil_scoped_release>());
    module.def("simulate_events", &simulate_events, py::arg("lane_starts"), py::arg("lane_nodes"), py::arg("lane_fillers"),
               py::arg("kinds"), py::arg("need_starts"), py::arg("needs"), py::arg("receiver_starts"), py::arg("receivers"),
               py::arg("seconds"), py::arg("latency_seconds"), py::arg("links"), py::kw_only(), py::arg("num_links"));
}
