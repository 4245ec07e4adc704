#include "post_balance.h"

#include <algorithm>

#include "bounded_search.h"
#include "differencing_partition.h"
#include "exchange_refinement.h"
#include "longest_first_ranked.h"
#include "padded_partition.h"
#include "ranked_items.h"

namespace braid {

namespace {

constexpr std::int64_t kMostSearchedItems = 256;
constexpr std::int64_t kMostSearchSteps = 1 << 15;

bool keeps_limit(const std::vector<std::int32_t>& bin_of_rank, const BinLimits& limits) {
    std::vector<std::int64_t> counts(limits.num_bins, 0);
    for (const std::int32_t bin : bin_of_rank) ++counts[bin];
    return *std::max_element(counts.begin(), counts.end()) <= limits.max_items_per_bin;
}

// Takes over another partition, improved, if it is cheaper.
void compete(std::vector<std::int32_t> other, const RankedItems& items, const BinLimits& limits, std::int64_t& num_steps,
             std::vector<std::int32_t>& bin_of_rank) {
    if (!keeps_limit(other, limits)) return;
    refine_by_exchange(items, limits.num_bins, limits.max_items_per_bin, limits.bound, num_steps, other);
    if (costliest_bin(items, limits.num_bins, other) < costliest_bin(items, limits.num_bins, bin_of_rank)) bin_of_rank.swap(other);
}

// What large batches do not need, as many short items even out: other partitions, then search.
void search_few_items(const RankedItems& items, const BinLimits& limits, std::int64_t num_steps,
                      std::vector<std::int32_t>& bin_of_rank) {
    if (num_steps <= 0 || costliest_bin(items, limits.num_bins, bin_of_rank) <= limits.bound) return;
    if (items.is_padded()) {
        RankedItems alone;
        for (std::int64_t rank = 0; rank < items.size(); ++rank) alone.additive.push_back(items.cost(rank));
        std::vector<std::int32_t> longest_first;
        place_longest_first(alone, limits.num_bins, limits.max_items_per_bin, longest_first);
        compete(std::move(longest_first), items, limits, num_steps, bin_of_rank);
    }
    compete(partition_by_differencing(items, limits.num_bins), items, limits, num_steps, bin_of_rank);
    search_partition(items, limits, std::min(num_steps, kMostSearchSteps), bin_of_rank);
}

}  // namespace

void post_balance(const std::int64_t* lengths, const std::int64_t* additive, const std::int64_t* padded, std::int64_t num_items,
                  std::int64_t num_bins, std::int64_t max_items_per_bin, std::int64_t refinement_steps,
                  std::int32_t* bin_of_item) {
    thread_local Ranking ranking;
    thread_local RankedItems items;
    thread_local std::vector<std::int32_t> bin_of_rank;
    ranking.rank(lengths, num_items);
    if (additive) {
        ranking.gather(additive, items.additive);
    } else {
        items.additive.assign(num_items, 0);
    }
    items.padded.clear();
    if (padded) ranking.gather(padded, items.padded);

    const BinLimits limits{num_bins, max_items_per_bin, lower_bound(items, num_bins)};
    std::int64_t costliest = INT64_MAX;
    if (padded) {
        bin_of_rank = partition_padded(items, num_bins, max_items_per_bin);
    } else {
        costliest = place_longest_first(items, num_bins, max_items_per_bin, bin_of_rank);
    }
    if (additive) {  // without, the padded partition is exact
        if (costliest > limits.bound + limits.bound / kGoodEnough)
            refine_by_exchange(items, num_bins, max_items_per_bin, limits.bound, refinement_steps, bin_of_rank);
        if (num_items <= kMostSearchedItems) search_few_items(items, limits, refinement_steps, bin_of_rank);
    }
    ranking.scatter(bin_of_rank, bin_of_item);
}

}  // namespace braid
