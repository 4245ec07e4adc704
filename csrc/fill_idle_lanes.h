// Fits work into the idle time of lanes that run other work in a given order. Reference:
// multimodal/references/fill_idle_lanes.py

#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"

namespace braid {

// Rows are starts into a flat array. Times are whole numbers of one unit.
struct LanesToFill {
    View<std::int64_t> durations;             // Per piece.
    View<std::int64_t> lane_starts, lanes;    // Per piece: it runs in all of them at once.
    View<std::int64_t> need_starts, needs;    // Per piece.
    View<std::int64_t> delays;                // Per need: from the end of what is needed to its arrival.
    View<std::int64_t> line_starts, line;     // Per lane: the pieces that keep this order.
    View<std::int64_t> queue_starts, queues;  // Pieces that fill; a queue's keep this order.
    View<std::int64_t> holders, releases;     // Per piece: the holder that keeps one more, and one less, from its start on; or -1.
    View<std::int64_t> limits;                // Per holder: the most that it keeps at a time.
    View<std::int64_t> wait_starts, waits;    // Per piece: times in which it only waits, one after another.
    View<std::uint8_t> goes_inside;           // Per piece: it may run in another one's waits; 2: it ends with a collective.
    View<std::int64_t> behind;                // Per piece: the part of its duration that is this collective.
    View<std::int64_t> tolerances;            // Percent of a filling piece that may exceed its idle time; ascending.
};

struct FilledLanes {
    std::vector<std::int64_t> order;  // All pieces, by their start; those inside a piece right before it.
    std::vector<std::int64_t> carriers, waits;  // Per piece: the piece and its wait in which it runs, or -1.
    std::int64_t end = 0;             // When the last one ends.
};

// The way that ends first, of one for each tolerance; of equals the first.
FilledLanes fill_idle_lanes(const LanesToFill& lanes);

}  // namespace braid
