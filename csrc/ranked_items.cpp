#include "ranked_items.h"

#include <algorithm>
#include <numeric>

#include "radix_sort.h"

namespace braid {

namespace {

constexpr std::int64_t kMostCounters = 1 << 18;  // a megabyte
constexpr std::int64_t kMostRounds = 16;  // further ones add little to the bound

// One counter per length: large batches hold each length several times over.
void rank_by_counting(const std::int64_t* lengths, std::int64_t longest, std::vector<std::uint32_t>& order) {
    thread_local std::vector<std::uint32_t> starts;
    starts.assign(longest + 2, 0);
    for (std::size_t index = 0; index < order.size(); ++index) ++starts[longest - lengths[index] + 1];
    for (std::int64_t distance = 0; distance < longest; ++distance) starts[distance + 1] += starts[distance];
    for (std::size_t index = 0; index < order.size(); ++index) {
        order[starts[longest - lengths[index]]++] = static_cast<std::uint32_t>(index);
    }
}

// Packs (distance from the longest, index) into one word, so that sorting moves words only.
void rank_by_digits(const std::int64_t* lengths, std::int64_t longest, std::vector<std::uint32_t>& order) {
    thread_local std::vector<std::uint64_t> keys, spare;
    keys.resize(order.size());
    for (std::size_t index = 0; index < order.size(); ++index) {
        keys[index] = static_cast<std::uint64_t>(longest - lengths[index]) << 32 | index;
    }
    radix_sort(keys, spare, std::uint64_t{0}, 32, bit_width(static_cast<std::uint64_t>(longest)));
    std::transform(keys.begin(), keys.end(), order.begin(), [](std::uint64_t key) { return static_cast<std::uint32_t>(key); });
}

void rank(const std::int64_t* lengths, std::vector<std::uint32_t>& order) {
    std::int64_t longest = 0;
    for (std::size_t index = 0; index < order.size(); ++index) longest = std::max(longest, lengths[index]);
    if (longest <= std::min<std::int64_t>(kMostCounters, 2 * order.size())) {
        rank_by_counting(lengths, longest, order);
    } else if (longest <= UINT32_MAX) {
        rank_by_digits(lengths, longest, order);
    } else {
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return lengths[a] > lengths[b]; });
    }
}

void gather(const std::int64_t* costs, const std::vector<std::uint32_t>& order, std::vector<std::int64_t>& ranked) {
    ranked.resize(costs ? order.size() : 0);
    for (std::size_t rank = 0; rank < ranked.size(); ++rank) ranked[rank] = costs[order[rank]];
}

}  // namespace

const RankedItems& rank_items(const std::int64_t* lengths, const std::int64_t* additive, const std::int64_t* padded,
                              std::int64_t num_items) {
    thread_local RankedItems items;
    items.item.resize(num_items);
    rank(lengths, items.item);
    gather(additive, items.item, items.additive);
    gather(padded, items.item, items.padded);
    if (!additive) items.additive.assign(num_items, 0);
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
