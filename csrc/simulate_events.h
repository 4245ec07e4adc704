// The event kernel of the schedule simulator. Reference: multimodal/references/simulate_events.py

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

// A read-only array that somebody else owns.
template <typename Value>
struct View {
    const Value* data;
    std::int64_t size;
    const Value& operator[](std::int64_t index) const { return data[index]; }
};

// One step as a graph of nodes; fields as in multimodal/schedule/simulate_events.py.
struct EventArrays {
    View<std::int64_t> lane_starts, lane_nodes;
    View<std::uint8_t> lane_fillers, kinds;
    View<std::int64_t> need_starts, needs, receiver_starts, receivers;
    View<double> seconds, latency_seconds;
    View<std::int64_t> links;
    std::int64_t num_links;
};

// When every node started and ended (NaN: never), and how many of its entries every lane got past.
struct EventTimes {
    std::vector<double> start_seconds, end_seconds;
    std::vector<std::int64_t> positions;
};

// Runs every lane in its order, each node as early as its needs and resources allow. Indices must be in range.
// O((nodes + needs) log lanes).
EventTimes simulate_events(const EventArrays& arrays);

}  // namespace braid
