// Who is told of an action's end. Reference: multimodal/schedule/link_actions.py

#pragma once

#include <cstdint>
#include <vector>

#include "list_schedule.h"

namespace braid {

// Pieces of a step, of which those in `listed` are actions, numbered by their position there.
struct PiecesToLink {
    View<std::int64_t> listed;
    View<std::int64_t> need_starts, needs;  // Per piece, rows.
    View<std::uint8_t> flags;               // Per action, see list_schedule.h.
    View<std::int64_t> microbatches;        // Per action.
    View<std::int64_t> before, after;       // Pairs of pieces, the first of which ends before the second begins.
};

// Rows of `ListedActions`; not complete if an action waits for a piece that is none.
struct Links {
    std::vector<std::int64_t> follower_starts, followers, release_starts, releases;
    bool is_complete = true;
};

// O(pieces + needs).
Links link_actions(const PiecesToLink& pieces);

}  // namespace braid
