// Largest differencing (Karmarkar and Karp 1982): a partition of few items that is often more even than longest first.

#pragma once

#include "ranked_items.h"

namespace braid {

// Returns the bin of each rank by `items.cost`. Bins may hold any number of items. num_bins: at least 1.
// O(n (log n + num_bins log num_bins)).
std::vector<std::int32_t> partition_by_differencing(const RankedItems& items, std::int64_t num_bins);

}  // namespace braid
