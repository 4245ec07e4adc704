// Search for the best partition of few items, ended by a count of what it looked at.

#pragma once

#include "ranked_items.h"

namespace braid {

// What a partition must keep to, and the cost below which no bin can be the costliest.
struct BinLimits {
    std::int64_t num_bins, max_items_per_bin, bound;
};

// Improves bin_of_rank in place: the items of the costliest bin and of one or two others are divided anew by branch and bound,
// then, where no such group helps, those of all bins. Ends when the costliest bin is within a thousandth of the bound, when nothing
// cheaper exists, or when `num_steps` bins have been looked at.
void search_partition(const RankedItems& items, const BinLimits& limits, std::int64_t num_steps,
                      std::vector<std::int32_t>& bin_of_rank);

}  // namespace braid
