// Local search on a partition: the costliest bin gives an item to a cheaper one, or swaps one.

#pragma once

#include "ranked_items.h"

namespace braid {

// Improves bin_of_rank in place until the costliest bin is within a thousandth of `bound`, no exchange helps it, or
// `num_steps`, which falls to what is left, candidate exchanges (several at a time where nothing is padded) have been looked at.
// No bin is ever made as costly as the costliest was, so the result is never worse.
void refine_by_exchange(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin, std::int64_t bound,
                        std::int64_t& num_steps, std::vector<std::int32_t>& bin_of_rank);

}  // namespace braid
