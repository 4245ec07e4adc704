// Items in descending order of what they cost: what the balancing kernels work on.

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

constexpr std::int64_t kGoodEnough = 1000;  // a costliest bin within one part in so many of the lower bound is not improved on

// Item costs by rank, longest first. A bin costs the sum of `additive` plus its number of items times the largest `padded`.
// Both descend with the rank; `padded` is empty where nothing is padded.
struct RankedItems {
    std::vector<std::uint32_t> item;  // which item of the caller has this rank
    std::vector<std::int64_t> additive, padded;

    std::int64_t size() const { return static_cast<std::int64_t>(item.size()); }
};

// Ranks items by descending length, equal lengths by index. `additive` or `padded` may be null; neither falls where lengths rise.
// What is returned is the thread's own and holds until it ranks again: on a large batch fresh memory would take as long as
// sorting. O(n) for lengths below 2^32, else O(n log n).
const RankedItems& rank_items(const std::int64_t* lengths, const std::int64_t* additive, const std::int64_t* padded,
                              std::int64_t num_items);

// No partition into num_bins bins has a bin that costs less, were nothing padded beyond itself: the mean, the longest item,
// and the shortest k + 1 of the first k num_bins + 1 items, two of which must share a bin with k - 1 others.
std::int64_t lower_bound(const RankedItems& items, std::int64_t num_bins);

}  // namespace braid
