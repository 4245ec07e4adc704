// Post-balancing: spreads the items of a batch over bins so that the costliest bin costs little (OrchMLLM, Alg. 1, 2, 4 and 5).
// Reference: multimodal/balance/algorithms/post_balance.py

#pragma once

#include <cstdint>

namespace braid {

// A bin costs the sum of its items' additive costs plus its number of items times their largest padded cost.
//
// lengths: [num_items], fewer than 2^31; what items are ordered by.
// additive, padded: [num_items] or null for none, but not both; not negative; functions of the length that do not fall. No bin, not
//     even one with all items, costs 2^62 or more.
// num_bins: at least 1; num_bins * max_items_per_bin is at least num_items.
// refinement_steps: budget of the local search, 0 for none; counted in looks at items, so the result does not depend on time.
// bin_of_item: [num_items], written.
void post_balance(const std::int64_t* lengths, const std::int64_t* additive, const std::int64_t* padded, std::int64_t num_items,
                  std::int64_t num_bins, std::int64_t max_items_per_bin, std::int64_t refinement_steps,
                  std::int32_t* bin_of_item);

}  // namespace braid
