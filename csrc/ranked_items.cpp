#include "ranked_items.h"

#include <algorithm>
#include <numeric>

#include "radix_sort.h"

namespace braid {

namespace {

constexpr std::int64_t kMostCounters = 1 << 18;  // a megabyte
constexpr std::int64_t kMostRounds = 16;  // further ones add little to the bound

// Four at a time, none of which waits for another.
std::int64_t longest_of(const std::int64_t* lengths, std::int64_t num_items) {
    std::int64_t most[4] = {0, 0, 0, 0}, index = 0;
    for (; index + 4 <= num_items; index += 4)
        for (int lane = 0; lane < 4; ++lane) most[lane] = std::max(most[lane], lengths[index + lane]);
    for (; index < num_items; ++index) most[0] = std::max(most[0], lengths[index]);
    return *std::max_element(most, most + 4);
}

}  // namespace

void Ranking::rank(const std::int64_t* lengths, std::int64_t num_items) {
    lengths_ = lengths;
    num_items_ = num_items;
    longest_ = longest_of(lengths, num_items);
    is_counted_ = longest_ <= std::min<std::int64_t>(kMostCounters, 2 * num_items);
    if (is_counted_) return count_lengths();
    item_.resize(num_items);
    if (longest_ <= UINT32_MAX) return rank_by_digits();
    std::iota(item_.begin(), item_.end(), 0);
    std::stable_sort(item_.begin(), item_.end(), [&](std::uint32_t a, std::uint32_t b) { return lengths[a] > lengths[b]; });
}

// One counter per length: large batches hold each length several times over, and no item has to be moved.
void Ranking::count_lengths() {
    starts_.assign(longest_ + 2, 0);
    for (std::int64_t index = 0; index < num_items_; ++index) ++starts_[longest_ - lengths_[index] + 1];
    for (std::int64_t distance = 0; distance < longest_; ++distance) starts_[distance + 1] += starts_[distance];
}

// Packs (distance from the longest, index) into one word, so that sorting moves words only.
void Ranking::rank_by_digits() {
    keys_.resize(num_items_);
    for (std::int64_t index = 0; index < num_items_; ++index) {
        keys_[index] = static_cast<std::uint64_t>(longest_ - lengths_[index]) << 32 | static_cast<std::uint64_t>(index);
    }
    radix_sort(keys_, spare_, std::uint64_t{0}, 32, bit_width(static_cast<std::uint64_t>(longest_)));
    std::transform(keys_.begin(), keys_.end(), item_.begin(), [](std::uint64_t key) { return static_cast<std::uint32_t>(key); });
}

void Ranking::gather(const std::int64_t* costs, std::vector<std::int64_t>& ranked) const {
    ranked.resize(num_items_);
    if (!is_counted_) {
        for (std::int64_t rank = 0; rank < num_items_; ++rank) ranked[rank] = costs[item_[rank]];
    } else {
        const bool is_length = costs == lengths_;
        cost_of_length_.resize(longest_ + 1);
        for (std::int64_t index = 0; index < num_items_ && !is_length; ++index) cost_of_length_[lengths_[index]] = costs[index];
        for (std::int64_t distance = 0; distance <= longest_; ++distance) {
            const std::int64_t end = distance == longest_ ? num_items_ : starts_[distance + 1];
            const std::int64_t cost = is_length ? longest_ - distance : cost_of_length_[longest_ - distance];
            std::fill(ranked.begin() + starts_[distance], ranked.begin() + end, cost);
        }
    }
}

void Ranking::scatter(const std::vector<std::int32_t>& of_rank, std::int32_t* of_item) const {
    if (!is_counted_) {
        for (std::int64_t rank = 0; rank < num_items_; ++rank) of_item[item_[rank]] = of_rank[rank];
        return;
    }
    next_.assign(starts_.begin(), starts_.end());
    for (std::int64_t index = 0; index < num_items_; ++index) of_item[index] = of_rank[next_[longest_ - lengths_[index]]++];
}

std::int64_t costliest_bin(const RankedItems& items, std::int64_t num_bins, const std::vector<std::int32_t>& bin_of_rank) {
    std::vector<std::int64_t> costs(num_bins, 0), padding(num_bins, -1);
    for (std::int64_t rank = 0; rank < items.size(); ++rank) {
        const std::int32_t bin = bin_of_rank[rank];
        if (padding[bin] < 0) padding[bin] = items.padding(rank);  // of the bin's longest item
        costs[bin] += items.additive[rank] + padding[bin];
    }
    return *std::max_element(costs.begin(), costs.end());
}

std::int64_t lower_bound(const RankedItems& items, std::int64_t num_bins) {
    std::int64_t total = std::accumulate(items.additive.begin(), items.additive.end(), std::int64_t{0});
    total = std::accumulate(items.padded.begin(), items.padded.end(), total);
    std::int64_t bound = (total + num_bins - 1) / num_bins;
    for (std::int64_t round = 0; round <= kMostRounds && round * num_bins < items.size(); ++round) {
        std::int64_t together = 0;
        for (std::int64_t rank = round * num_bins - round; rank <= round * num_bins; ++rank) together += items.cost(rank);
        bound = std::max(bound, together);
    }
    return bound;
}

}  // namespace braid
