#include "ranked_items.h"

#include <algorithm>
#include <numeric>

#include "radix_sort.h"

namespace braid {

namespace {

constexpr std::int64_t kMostRounds = 16;  // further ones add little to the bound

// Packs (distance from the longest, index) into one word, so that sorting moves words only.
std::vector<std::uint32_t> rank_short(const std::int64_t* costs, std::int64_t num_items, std::int64_t longest) {
    // Kept for the next batch of the thread: fresh pages would take as long as sorting.
    thread_local std::vector<std::uint64_t> keys, spare;
    keys.resize(num_items);
    for (std::int64_t index = 0; index < num_items; ++index) {
        keys[index] = static_cast<std::uint64_t>(longest - costs[index]) << 32 | static_cast<std::uint64_t>(index);
    }
    radix_sort(keys, spare, 32, bit_width(static_cast<std::uint64_t>(longest)));
    return {keys.begin(), keys.end()};
}

std::vector<std::uint32_t> rank(const std::int64_t* costs, std::int64_t num_items) {
    std::int64_t longest = 0;
    for (std::int64_t index = 0; index < num_items; ++index) longest = std::max(longest, costs[index]);
    if (longest <= UINT32_MAX) return rank_short(costs, num_items, longest);
    std::vector<std::uint32_t> order(num_items);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return costs[a] > costs[b]; });
    return order;
}

std::vector<std::int64_t> gather(const std::int64_t* costs, const std::vector<std::uint32_t>& order) {
    std::vector<std::int64_t> ranked(order.size());
    std::transform(order.begin(), order.end(), ranked.begin(), [&](std::uint32_t index) { return costs[index]; });
    return ranked;
}

}  // namespace

RankedItems rank_items(const std::int64_t* additive, const std::int64_t* padded, std::int64_t num_items) {
    RankedItems items;
    items.item = rank(additive ? additive : padded, num_items);
    items.additive = additive ? gather(additive, items.item) : std::vector<std::int64_t>(num_items, 0);
    if (padded) items.padded = gather(padded, items.item);
    return items;
}

std::int64_t lower_bound(const RankedItems& items, std::int64_t num_bins) {
    const auto cost = [&](std::int64_t rank) {
        return items.additive[rank] + (items.padded.empty() ? 0 : items.padded[rank]);
    };
    std::int64_t total = 0;
    for (std::int64_t rank = 0; rank < items.size(); ++rank) total += cost(rank);
    std::int64_t bound = (total + num_bins - 1) / num_bins;
    for (std::int64_t round = 0; round <= kMostRounds && round * num_bins < items.size(); ++round) {
        std::int64_t together = 0;
        for (std::int64_t rank = round * num_bins - round; rank <= round * num_bins; ++rank) together += cost(rank);
        bound = std::max(bound, together);
    }
    return bound;
}

}  // namespace braid
