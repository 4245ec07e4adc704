// The Python module multimodal._kernels: one line per kernel. No torch, so one build serves every torch version.

#include <algorithm>
#include <memory>
#include <optional>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "block_summary.h"
#include "cut_evenly.h"
#include "distribute_longest_first.h"
#include "entrain_assignment.h"
#include "fill_idle_lanes.h"
#include "group_rows.h"
#include "link_actions.h"
#include "list_schedule.h"
#include "longest_first_partition.h"
#include "map_stages.h"
#include "post_balance.h"
#include "rearrange_nodes.h"
#include "reorder_microbatches.h"
#include "simulate_events.h"
#include "work_list.h"

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

// Rows as where each starts, and the values of all.
py::tuple to_rows(const std::vector<std::vector<std::int64_t>>& rows) {
    std::vector<std::int64_t> starts(1, 0);
    for (const auto& row : rows) starts.push_back(starts.back() + static_cast<std::int64_t>(row.size()));
    py::array_t<std::int64_t> values(static_cast<py::ssize_t>(starts.back()));
    std::int64_t* next = values.mutable_data();
    for (const auto& row : rows) next = std::copy(row.begin(), row.end(), next);
    return py::make_tuple(to_array(starts), values);
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

py::tuple fill_idle_lanes(const Array<std::int64_t>& durations, const Array<std::int64_t>& lane_starts,
                          const Array<std::int64_t>& lanes, const Array<std::int64_t>& need_starts,
                          const Array<std::int64_t>& needs, const Array<std::int64_t>& delays,
                          const Array<std::int64_t>& line_starts, const Array<std::int64_t>& line,
                          const Array<std::int64_t>& queue_starts, const Array<std::int64_t>& queues,
                          const Array<std::int64_t>& holders, const Array<std::int64_t>& releases,
                          const Array<std::int64_t>& limits, const Array<std::int64_t>& wait_starts,
                          const Array<std::int64_t>& waits, const Array<std::uint8_t>& goes_inside,
                          const Array<std::int64_t>& behind, const Array<std::int64_t>& tolerances) {
    const braid::LanesToFill to_fill{view(durations),   view(lane_starts),  view(lanes),  view(need_starts), view(needs),
                                     view(delays),      view(line_starts),  view(line),   view(queue_starts), view(queues),
                                     view(holders),     view(releases),     view(limits), view(wait_starts), view(waits),
                                     view(goes_inside), view(behind),      view(tolerances)};
    braid::FilledLanes filled;
    {
        py::gil_scoped_release release;
        filled = braid::fill_idle_lanes(to_fill);
    }
    return py::make_tuple(to_array(filled.order), to_array(filled.carriers), to_array(filled.waits), filled.end);
}

py::tuple link_actions(const Array<std::int64_t>& listed, const Array<std::int64_t>& need_starts,
                       const Array<std::int64_t>& needs, const Array<std::uint8_t>& flags,
                       const Array<std::int64_t>& microbatches, const Array<std::int64_t>& before,
                       const Array<std::int64_t>& after) {
    const braid::PiecesToLink pieces{view(listed),       view(need_starts), view(needs), view(flags),
                                     view(microbatches), view(before),      view(after)};
    braid::Links links;
    {
        py::gil_scoped_release release;
        links = braid::link_actions(pieces);
    }
    if (!links.is_complete) throw py::index_error("what is waited for is not scheduled");
    return py::make_tuple(to_array(links.follower_starts), to_array(links.followers), to_array(links.release_starts),
                          to_array(links.releases));
}

py::tuple list_schedule(
    const Array<std::int64_t>& lane_starts, const Array<std::int64_t>& lanes, const Array<std::int64_t>& costs,
    const Array<std::int64_t>& microbatches, const Array<std::int64_t>& groups, const Array<std::uint8_t>& flags,
    const Array<std::int64_t>& follower_starts, const Array<std::int64_t>& followers, const Array<std::int64_t>& release_starts,
    const Array<std::int64_t>& releases, const Array<std::int64_t>& phases, const Array<std::int64_t>& forward_limits,
    const Array<std::int64_t>& storage_limits, const Array<std::int64_t>& forward_floors, std::int64_t num_lanes) {
    const braid::ListedActions actions{view(lane_starts),    view(lanes),          view(costs),          view(microbatches),
                                       view(groups),         view(flags),          view(follower_starts), view(followers),
                                       view(release_starts), view(releases),       view(phases),         view(forward_limits),
                                       view(storage_limits), view(forward_floors), num_lanes};
    std::vector<std::vector<std::int64_t>> lanes_in_order;
    {
        py::gil_scoped_release release;
        lanes_in_order = braid::list_schedule(actions);
    }
    return to_rows(lanes_in_order);
}

braid::BlockStrips summarize_mask_blocks(const Array<std::int64_t>& starts, const Array<std::int64_t>& bits,
                                         const Array<std::int32_t>& sample_ids, const Array<std::int32_t>& item_ids,
                                         std::int64_t window, std::int64_t query_block_size, std::int64_t key_block_size) {
    const braid::MaskRuns runs{view(starts), view(bits), view(sample_ids), view(item_ids), window};
    py::gil_scoped_release release;
    return braid::summarize_blocks(runs, query_block_size, key_block_size);
}

py::tuple list_mask_blocks(const Array<std::int64_t>& starts, const Array<std::int64_t>& bits,
                           const Array<std::int32_t>& sample_ids, const Array<std::int32_t>& item_ids, std::int64_t window,
                           std::int64_t query_block_size, std::int64_t key_block_size) {
    const auto summary = summarize_mask_blocks(starts, bits, sample_ids, item_ids, window, query_block_size, key_block_size);
    py::array_t<std::int32_t> key_blocks(static_cast<py::ssize_t>(summary.row_starts.back()));
    py::array_t<bool> is_full(static_cast<py::ssize_t>(summary.row_starts.back()));
    {
        std::int32_t* const blocks = key_blocks.mutable_data();
        bool* const full = is_full.mutable_data();
        py::gil_scoped_release release;
        braid::expand_strips(summary, blocks, full);
    }
    return py::make_tuple(to_array(summary.row_starts), key_blocks, is_full, to_array(summary.visible_pairs));
}

py::tuple count_mask_blocks(const Array<std::int64_t>& starts, const Array<std::int64_t>& bits,
                            const Array<std::int32_t>& sample_ids, const Array<std::int32_t>& item_ids, std::int64_t window,
                            std::int64_t query_block_size, std::int64_t key_block_size) {
    const auto summary = summarize_mask_blocks(starts, bits, sample_ids, item_ids, window, query_block_size, key_block_size);
    return py::make_tuple(to_array(summary.row_starts), to_array(summary.visible_pairs));
}

py::tuple order_blocks(const Array<std::int64_t>& row_starts, const Array<std::int32_t>& blocks, const Array<bool>& is_full,
                       std::int64_t num_whole_rows, std::int64_t num_whole_columns) {
    const auto starts = view(row_starts);
    const auto listed = view(blocks);
    const auto full = view(is_full);
    py::array_t<std::int32_t> full_ends(static_cast<py::ssize_t>(starts.size - 1)), ordered(static_cast<py::ssize_t>(listed.size));
    {
        std::int32_t* const ends = full_ends.mutable_data();
        std::int32_t* const entries = ordered.mutable_data();
        py::gil_scoped_release release;
        braid::order_blocks(starts, listed, full, num_whole_rows, num_whole_columns, ends, entries);
    }
    return py::make_tuple(full_ends, ordered);
}

py::tuple plan_work_list(const Array<std::int32_t>& row_starts, const Array<std::int32_t>& full_ends, std::int64_t limit) {
    const auto starts = view(row_starts);
    const auto ends = view(full_ends);
    braid::WorkList work;
    {
        py::gil_scoped_release release;
        work = braid::plan_work_list(starts, ends, limit);
    }
    return py::make_tuple(to_array(work.items), to_array(work.split_rows), work.num_slots);
}

py::array_t<std::int64_t> find_mask_runs(const Array<std::int64_t>& bits, const Array<std::int32_t>& sample_ids,
                                         const Array<std::int32_t>& item_ids) {
    const auto views = std::make_tuple(view(bits), view(sample_ids), view(item_ids));
    std::vector<std::int64_t> starts;
    {
        py::gil_scoped_release release;
        starts = std::apply(braid::find_mask_runs, views);
    }
    return to_array(starts);
}

py::tuple assign_entrain(const Array<double>& llm_loads, const Array<double>& encoder_loads, std::int64_t num_replicas,
                         std::int64_t num_microbatches, std::int64_t min_num_microbatches, std::int64_t max_subset_sums) {
    const auto num_samples = static_cast<std::int64_t>(llm_loads.size());
    braid::UnitLoads encoders;
    for (py::ssize_t encoder = 0; encoder < encoder_loads.shape(0); ++encoder) {
        encoders.push_back(encoder_loads.data() + encoder * num_samples);
    }
    braid::EntrainPlaces places;
    {
        py::gil_scoped_release release;
        places = braid::assign_entrain(llm_loads.data(), encoders, num_samples,
                                       {num_replicas, num_microbatches, min_num_microbatches, max_subset_sums});
    }
    return py::make_tuple(places.replicas, places.encoder_microbatches, places.llm_microbatches, places.num_microbatches);
}

// An array whose memory, where it is large, is kept for the next one: fresh memory would take a sixth of a large batch's time.
// Held under the interpreter's lock, as arrays end under it.
py::array_t<std::int32_t> reused_array(py::ssize_t size) {
    constexpr std::size_t kMostKept = 8;
    constexpr py::ssize_t kLeastSize = 1 << 15;
    if (size < kLeastSize) return py::array_t<std::int32_t>(size);
    using Buffer = std::vector<std::int32_t>;
    static auto* const kept = new std::vector<std::unique_ptr<Buffer>>();  // outlives all arrays
    std::unique_ptr<Buffer> buffer;
    if (kept->empty()) {
        buffer = std::make_unique<Buffer>();
    } else {
        buffer = std::move(kept->back());
        kept->pop_back();
    }
    buffer->resize(static_cast<std::size_t>(size));
    std::int32_t* const data = buffer->data();
    const py::capsule owner(buffer.release(), [](void* released) {
        std::unique_ptr<Buffer> back(static_cast<Buffer*>(released));
        if (kept->size() < kMostKept) kept->push_back(std::move(back));
    });
    return py::array_t<std::int32_t>(size, data, owner);
}

py::array_t<std::int32_t> post_balance(const Array<std::int64_t>& lengths, const std::optional<Array<std::int64_t>>& additive,
                                       const std::optional<Array<std::int64_t>>& padded, std::int64_t num_bins,
                                       std::int64_t max_items_per_bin, std::int64_t refinement_steps) {
    py::array_t<std::int32_t> bin_of_item = reused_array(lengths.size());
    std::int32_t* bins = bin_of_item.mutable_data();
    {
        py::gil_scoped_release release;
        braid::post_balance(lengths.data(), additive ? additive->data() : nullptr, padded ? padded->data() : nullptr,
                            lengths.size(), num_bins, max_items_per_bin, refinement_steps, bins);
    }
    return bin_of_item;
}

py::tuple cut_evenly(const Array<std::int64_t>& amounts, const Array<std::int64_t>& starts, const Array<std::int64_t>& counts) {
    std::vector<std::int64_t> runs, num_runs;
    {
        py::gil_scoped_release release;
        runs = braid::cut_evenly(amounts.data(), starts.data(), counts.data(), counts.size(), num_runs);
    }
    return py::make_tuple(to_array(runs), to_array(num_runs));
}

py::tuple map_stages(const Array<std::int64_t>& forward, const Array<std::int64_t>& backward,
                     const Array<std::int64_t>& capacities, const Array<std::int64_t>& sizes,
                     const Array<std::int64_t>& num_gpus, const Array<std::int64_t>& num_microbatches) {
    const braid::StageTables tables{view(forward), view(backward), view(capacities), view(sizes), forward.shape(1)};
    std::vector<braid::StageMapping> mappings;
    {
        py::gil_scoped_release release;
        mappings = braid::map_stages(tables, view(num_gpus), view(num_microbatches));
    }
    std::vector<std::int64_t> ticks;
    std::vector<std::vector<std::int64_t>> ends, gpus;
    for (auto& mapping : mappings) {
        ticks.push_back(mapping.ticks);
        ends.push_back(std::move(mapping.ends));
        gpus.push_back(std::move(mapping.sizes));
    }
    return py::make_tuple(to_array(ticks), to_rows(ends), to_rows(gpus));
}

py::tuple group_rows(const Array<std::int64_t>& owners, const Array<std::int64_t>& values, std::int64_t num_rows) {
    for (py::ssize_t index = 0; index < owners.size(); ++index)
        if (owners.data()[index] < 0 || owners.data()[index] >= num_rows) throw py::index_error("an owner is no row");
    py::array_t<std::int64_t> starts(static_cast<py::ssize_t>(num_rows + 1)), grouped(values.size());
    std::int64_t *const begin = starts.mutable_data(), *const filled = grouped.mutable_data();
    {
        py::gil_scoped_release release;
        braid::group_rows(owners.data(), values.data(), values.size(), num_rows, begin, filled);
    }
    return py::make_tuple(starts, grouped);
}

std::vector<std::int64_t> reorder_microbatches(const Array<double>& forward_seconds, const Array<double>& backward_seconds,
                                               const Array<std::int64_t>& step_codes, std::int64_t num_stages,
                                               std::int64_t num_swaps) {
    const braid::PipelineShape shape{num_stages,
                                     static_cast<std::int64_t>(forward_seconds.shape(0)),
                                     static_cast<std::int64_t>(forward_seconds.shape(1)) - 1,
                                     forward_seconds.data(),
                                     backward_seconds.data(),
                                     step_codes.data(),
                                     static_cast<std::int64_t>(step_codes.size())};
    py::gil_scoped_release release;
    return braid::reorder_microbatches(shape, num_swaps);
}

py::array_t<std::int64_t> rearrange_nodes(const Array<std::int64_t>& row_starts, const Array<std::int64_t>& batches,
                                          const Array<std::int64_t>& volumes, std::int64_t ranks_per_node,
                                          std::int64_t num_first_swaps, std::int64_t max_chain_length,
                                          std::int64_t max_evaluations) {
    const auto rows = view(row_starts), columns = view(batches), held = view(volumes);
    std::vector<std::int64_t> nodes;
    {
        py::gil_scoped_release release;
        nodes = braid::rearrange_nodes(rows, columns, held, ranks_per_node, {num_first_swaps, max_chain_length, max_evaluations});
    }
    return to_array(nodes);
}

py::array_t<std::int32_t> distribute_longest_first(const Array<std::int64_t>& workloads, std::int64_t num_ranks,
                                                   bool has_equal_counts, std::int64_t max_exchanges) {
    const auto blocks = view(workloads);
    std::vector<std::int32_t> owners;
    {
        py::gil_scoped_release release;
        owners = braid::distribute_longest_first(blocks, num_ranks, has_equal_counts, max_exchanges);
    }
    return to_array(owners);
}

}  // namespace

PYBIND11_MODULE(_kernels, module) {
    module.doc() = "C++ kernels of Braid's decisions; each has a Python reference of the same name.";

    // Integers first: their sums are exact, and pybind11 never turns a float into an integer.
    module.def("partition_longest_first", &braid::partition_longest_first<std::int64_t>, py::arg("costs"), py::kw_only(),
               py::arg("num_bins"), py::arg("max_items_per_bin"), py::call_guard<py::gil_scoped_release>());
    module.def("partition_longest_first", &braid::partition_longest_first<double>, py::arg("costs"), py::kw_only(),
               py::arg("num_bins"), py::arg("max_items_per_bin"), py::call_guard<py::gil_scoped_release>());
    module.def("post_balance", &post_balance, py::arg("lengths"), py::arg("additive"), py::arg("padded"), py::kw_only(),
               py::arg("num_bins"), py::arg("max_items_per_bin"), py::arg("refinement_steps"));
    module.def("cut_evenly", &cut_evenly, py::arg("amounts"), py::arg("starts"), py::arg("counts"));
    module.def("map_stages", &map_stages, py::arg("forward"), py::arg("backward"), py::arg("capacities"), py::arg("sizes"),
               py::kw_only(), py::arg("num_gpus"), py::arg("num_microbatches"));
    module.def("group_rows", &group_rows, py::arg("owners"), py::arg("values"), py::arg("num_rows"));
    module.def("simulate_events", &simulate_events, py::arg("lane_starts"), py::arg("lane_nodes"), py::arg("lane_fillers"),
               py::arg("kinds"), py::arg("need_starts"), py::arg("needs"), py::arg("receiver_starts"), py::arg("receivers"),
               py::arg("seconds"), py::arg("latency_seconds"), py::arg("links"), py::kw_only(), py::arg("num_links"));
    module.def("fill_idle_lanes", &fill_idle_lanes, py::kw_only(), py::arg("durations"), py::arg("lane_starts"), py::arg("lanes"),
               py::arg("need_starts"), py::arg("needs"), py::arg("delays"), py::arg("line_starts"), py::arg("line"),
               py::arg("queue_starts"), py::arg("queues"), py::arg("holders"), py::arg("releases"), py::arg("limits"),
               py::arg("wait_starts"), py::arg("waits"), py::arg("goes_inside"), py::arg("behind"), py::arg("tolerances"));
    module.def("link_actions", &link_actions, py::arg("listed"), py::arg("need_starts"), py::arg("needs"), py::arg("flags"),
               py::arg("microbatches"), py::arg("before"), py::arg("after"));
    module.def("list_schedule", &list_schedule, py::kw_only(), py::arg("lane_starts"), py::arg("lanes"), py::arg("costs"),
               py::arg("microbatches"), py::arg("groups"), py::arg("flags"), py::arg("follower_starts"), py::arg("followers"),
               py::arg("release_starts"), py::arg("releases"), py::arg("phases"), py::arg("forward_limits"),
               py::arg("storage_limits"), py::arg("forward_floors"), py::arg("num_lanes"));
    module.def("find_mask_runs", &find_mask_runs, py::arg("bits"), py::arg("sample_ids"), py::arg("item_ids"));
    module.def("list_mask_blocks", &list_mask_blocks, py::arg("starts"), py::arg("bits"), py::arg("sample_ids"),
               py::arg("item_ids"), py::arg("window"), py::arg("query_block_size"), py::arg("key_block_size"));
    module.def("count_mask_blocks", &count_mask_blocks, py::arg("starts"), py::arg("bits"), py::arg("sample_ids"),
               py::arg("item_ids"), py::arg("window"), py::arg("query_block_size"), py::arg("key_block_size"));
    module.def("order_blocks", &order_blocks, py::arg("row_starts"), py::arg("blocks"), py::arg("is_full"),
               py::arg("num_whole_rows"), py::arg("num_whole_columns"));
    module.def("plan_work_list", &plan_work_list, py::arg("row_starts"), py::arg("full_ends"), py::arg("limit"));
    module.def("assign_entrain", &assign_entrain, py::arg("llm_loads"), py::arg("encoder_loads"), py::kw_only(),
               py::arg("num_replicas"), py::arg("num_microbatches"), py::arg("min_num_microbatches"),
               py::arg("max_subset_sums"));
    module.def("reorder_microbatches", &reorder_microbatches, py::arg("forward_seconds"), py::arg("backward_seconds"),
               py::arg("step_codes"), py::kw_only(), py::arg("num_stages"), py::arg("num_swaps"));
    module.def("rearrange_nodes", &rearrange_nodes, py::arg("row_starts"), py::arg("batches"), py::arg("volumes"),
               py::kw_only(), py::arg("ranks_per_node"), py::arg("num_first_swaps"), py::arg("max_chain_length"),
               py::arg("max_evaluations"));
    module.def("distribute_longest_first", &distribute_longest_first, py::arg("workloads"), py::kw_only(), py::arg("num_ranks"),
               py::arg("has_equal_counts"), py::arg("max_exchanges"));
}
