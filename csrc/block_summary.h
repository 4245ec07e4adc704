// Which blocks of an attention mask are empty, partial or full, from the runs of its bitfield.
// Reference: multimodal/attention/block_summary.py

#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"  // View

namespace braid {

// A mask as runs of tokens that are alike; run r holds tokens starts[r] .. starts[r + 1] - 1.
struct MaskRuns {
    View<std::int64_t> starts;  // [num_runs + 1]
    View<std::int64_t> bits;    // [num_runs], as in multimodal/attention/bitfield.py
    View<std::int32_t> sample_ids, item_ids;
    std::int64_t window;  // keys that a causal token sees, at most
};

// Consecutive key blocks of one query block that are alike: first .. last, both included.
struct Strip {
    std::int32_t first, last;
    bool is_full;
};

// The blocks with anything visible, by query block.
struct BlockStrips {
    struct Row {
        std::int64_t first_strip, last_strip;  // the last one excluded; rows that are alike share strips
    };
    std::vector<Row> rows;                    // [num_query_blocks]
    std::vector<Strip> strips;                // ascending in each row
    std::vector<std::int64_t> row_starts;     // [num_query_blocks + 1]: where each row begins when all blocks are listed
    std::vector<std::int64_t> visible_pairs;  // [num_query_blocks]
};

// Returns where runs of tokens equal in all three arrays (of one size) start, and the number of tokens. O(tokens).
std::vector<std::int64_t> find_mask_runs(View<std::int64_t> bits, View<std::int32_t> sample_ids, View<std::int32_t> item_ids);

// Summarizes a mask without looking at single tokens. Sample ids never descend; causal runs have bit 0, others exactly one
// bit of 1-61. O(runs + sum over query blocks of n log n), n the intervals of keys that the runs in a block see.
BlockStrips summarize_blocks(const MaskRuns& runs, std::int64_t query_block_size, std::int64_t key_block_size);

// Writes every block of every strip: its key block and whether it is full. Both arrays hold row_starts.back() entries.
void expand_strips(const BlockStrips& strips, std::int32_t* key_blocks, bool* is_full);

}  // namespace braid
