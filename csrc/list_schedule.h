// The list scheduler of the builders. Reference: multimodal/references/list_schedule.py

#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"

namespace braid {

// What is scheduled: actions numbered by urgency, the most urgent first. Rows are starts into a flat array.
struct ListedActions {
    View<std::int64_t> lane_starts, lanes;           // Per action.
    View<std::int64_t> costs, microbatches, groups;  // Per action; groups share limits.
    View<std::uint8_t> flags;                        // Per action, see below.
    View<std::int64_t> follower_starts, followers;   // Per action those that wait for it, in the order in which they are told.
    View<std::int64_t> release_starts, releases;     // Per action the forwards whose activations it no longer needs.
    View<std::int64_t> phases;                       // Per action; empty: none.
    View<std::int64_t> forward_limits, storage_limits, forward_floors;  // Per group; -1: no limit.
    std::int64_t num_lanes;
};

constexpr std::uint8_t kIsForward = 1, kIsGradient = 2, kIsWeightGradient = 4;
constexpr std::uint8_t kHasGradient = 8;        // Of a forward: a backward follows.
constexpr std::uint8_t kHasWeightGradient = 16;  // Of a forward: a weight gradient of its own follows.

// The actions of every lane in order; all of them, unless orders contradict dependencies. O((actions + followers) log actions).
std::vector<std::vector<std::int64_t>> list_schedule(const ListedActions& actions);

}  // namespace braid
