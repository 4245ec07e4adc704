// Items in descending order of what they cost: what the balancing kernels work on.

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

constexpr std::int64_t kGoodEnough = 1000;  // a costliest bin within one part in so many of the lower bound is not improved on

// Item costs by rank, longest first. A bin costs the sum of `additive` plus its number of items times the largest `padded`.
// Both descend with the rank; `padded` is empty where nothing is padded.
struct RankedItems {
    std::vector<std::int64_t> additive, padded;

    std::int64_t size() const { return static_cast<std::int64_t>(additive.size()); }
    bool is_padded() const { return !padded.empty(); }
    std::int64_t padding(std::int64_t rank) const { return is_padded() ? padded[rank] : 0; }
    std::int64_t cost(std::int64_t rank) const { return additive[rank] + padding(rank); }  // of a bin of this item alone
};

// Which rank each item has: by descending length, equal lengths by index. Its memory is kept for the next batch: on a large one
// fresh memory would take as long as sorting.
class Ranking {
   public:
    // lengths: [num_items], fewer than 2^32; must stay as they are while the ranks are in use. O(n) for lengths below 2^32, else
    // O(n log n).
    void rank(const std::int64_t* lengths, std::int64_t num_items);

    // Writes the costs of all items by rank: a function of the length, or the lengths themselves. Not for two threads at a time.
    void gather(const std::int64_t* costs, std::vector<std::int64_t>& ranked) const;

    // Writes what each item's rank has: the inverse of `gather`.
    void scatter(const std::vector<std::int32_t>& of_rank, std::int32_t* of_item) const;

   private:
    void count_lengths();
    void rank_by_digits();

    const std::int64_t* lengths_ = nullptr;
    std::int64_t num_items_ = 0, longest_ = 0;
    bool is_counted_ = false;
    std::vector<std::uint32_t> starts_;         // where counted: the first rank of the length so far below the longest
    mutable std::vector<std::uint32_t> next_;   // scratch: `starts_` while ranks are given out
    mutable std::vector<std::int64_t> cost_of_length_;  // scratch
    std::vector<std::uint32_t> item_;           // else: which item has each rank
    std::vector<std::uint64_t> keys_, spare_;
};

// The cost of the costliest bin.
std::int64_t costliest_bin(const RankedItems& items, std::int64_t num_bins, const std::vector<std::int32_t>& bin_of_rank);

// No partition into num_bins bins has a bin that costs less, were nothing padded beyond itself: the mean, the longest item,
// and the shortest k + 1 of the first k num_bins + 1 items, two of which must share a bin with k - 1 others.
std::int64_t lower_bound(const RankedItems& items, std::int64_t num_bins);

}  // namespace braid
