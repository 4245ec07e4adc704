// Puts sends and receives into lanes. Reference: multimodal/schedule/passes/insert_communication.py

#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"

namespace braid {

// Computations by lane, and the messages that their dependencies need. Rows are starts into a flat array.
struct LanesToLower {
    View<std::int64_t> lane_starts, lane_actions;
    View<std::int64_t> producers, consumers;         // Per message; messages are sorted in the order of sending.
    View<std::int64_t> source_starts, source_lanes;  // Per message the lanes that it comes from.
    std::int64_t num_actions;
};

// Per lane what it does: computation a as 3 a, the send of message m as 3 m + 1, its receive as 3 m + 2.
// A send stands right after its producer; before a consumer stand the receives that it needs, together with every earlier
// message from the same lanes that is still to be received, in the order of sending. O((actions + messages) log).
std::vector<std::vector<std::int64_t>> lower_lanes(const LanesToLower& lanes);

}  // namespace braid
