// Partitions for batches that are padded: items of like length share a bin.

#pragma once

#include "ranked_items.h"

namespace braid {

// Returns the bin of each rank. Exact where the additive costs are zero, see multimodal/balance/algorithms/post_balance.py.
// items.padded is not empty; num_bins * max_items_per_bin is at least the number of items.
// O(n + num_bins log(cost)) where the additive costs are zero, else O(n log n) for each of a few bounds.
std::vector<std::int32_t> partition_padded(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin);

}  // namespace braid
