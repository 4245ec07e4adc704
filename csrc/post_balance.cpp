#include "post_balance.h"

#include "exchange_refinement.h"
#include "longest_first_ranked.h"
#include "padded_partition.h"
#include "ranked_items.h"

namespace braid {

void post_balance(const std::int64_t* lengths, const std::int64_t* additive, const std::int64_t* padded, std::int64_t num_items,
                  std::int64_t num_bins, std::int64_t max_items_per_bin, std::int64_t refinement_steps,
                  std::int32_t* bin_of_item) {
    const RankedItems& items = rank_items(lengths, additive, padded, num_items);
    thread_local std::vector<std::int32_t> bin_of_rank;  // kept for the next batch, as the ranked items are
    if (padded) {
        bin_of_rank = partition_padded(items, num_bins, max_items_per_bin);
    } else {
        place_longest_first(items, num_bins, max_items_per_bin, bin_of_rank);
    }
    if (additive) {  // without, the padded partition is exact
        refine_by_exchange(items, num_bins, max_items_per_bin, lower_bound(items, num_bins), refinement_steps, bin_of_rank);
    }
    for (std::int64_t rank = 0; rank < num_items; ++rank) bin_of_item[items.item[rank]] = bin_of_rank[rank];
}

}  // namespace braid
