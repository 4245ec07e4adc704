// Runs a schedule in the strictest way, on a clock of given costs. Reference: multimodal/schedule/execute_lanes_reference.py

#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"

namespace braid {

// A schedule as numbers; rows of variable length are given as starts (one more than there are rows) into a flat array.
struct NumberedLanes {
    View<std::int64_t> lane_starts, lane_actions;    // What each lane does, in order.
    View<std::uint8_t> resources;                    // Per action: 0 compute, 1 send, 2 receive, 3 collective.
    View<std::int64_t> stages;                       // Per action the row of `stage_lanes` that it belongs to.
    View<std::int64_t> stage_starts, stage_lanes;    // Per stage its lanes.
    View<std::int64_t> need_starts, needs;           // Per action what must be complete before it.
    View<std::int64_t> collectives;                  // Per action its collective; -1: none.
    View<std::int64_t> member_starts, members;       // Per collective the actions that take part.
    View<double> durations;                          // Per action.
};

// What ran, one entry per action and lane in the order in which it was found; messages are not among it.
struct LaneEvents {
    std::vector<std::int64_t> actions, lanes;
    std::vector<double> start_seconds, end_seconds;
    std::vector<std::int64_t> positions;   // Per lane the first entry that could not run.
    std::vector<std::uint8_t> is_done;     // Per action.
};

// Every action must stand in lanes of its stage only, at most once in each. O(actions + needs).
LaneEvents execute_lanes(const NumberedLanes& lanes);

}  // namespace braid
