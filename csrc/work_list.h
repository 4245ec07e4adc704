// The work of attention's persistent grid: rows of blocks cut into items, longest first.
// Reference: multimodal/attention/triton_kernels/work_list.py

#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"  // View

namespace braid {

// Orders the blocks of every row: full ones first, then those that need the mask; each kind in the order of the list. Blocks from
// num_whole_columns on and rows from num_whole_rows on reach beyond the last token and count as partial. Fills full_ends
// [num_rows] with where the full blocks of each row end, and ordered [num_entries]. O(entries).
void order_blocks(View<std::int64_t> row_starts, View<std::int32_t> blocks, View<bool> is_full, std::int64_t num_whole_rows,
                  std::int64_t num_whole_columns, std::int32_t* full_ends, std::int32_t* ordered);

struct WorkList {
    std::vector<std::int32_t> items;       // [num_items, 5]: row, first entry, end of full entries, end of entries, slot or -1
    std::vector<std::int32_t> split_rows;  // [num_split_rows, 3]: row, first slot, number of slots
    std::int64_t num_slots = 0;
};

// Cuts rows into items of nearly equal length, at most `limit` entries each, and sorts them longest first, equal lengths in the
// order of rows; limit 0: rows stay whole and in order. O(items + longest item).
WorkList plan_work_list(View<std::int32_t> row_starts, View<std::int32_t> full_ends, std::int64_t limit);

}  // namespace braid
