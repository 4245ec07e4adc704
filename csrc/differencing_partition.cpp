#include "differencing_partition.h"

#include <algorithm>
#include <queue>
#include <utility>

namespace braid {

namespace {

// The items that share a bin, as a chain of ranks, and how much they cost beyond the lightest bin of their partition.
struct Share {
    std::int64_t cost;
    std::int64_t first, last;
};

// A partition of some items: its shares by descending cost; those beyond the end are empty and cost nothing.
using Shares = std::vector<Share>;

class Differencing {
   public:
    Differencing(const RankedItems& items, std::int64_t num_bins)
        : items_(items), num_bins_(num_bins), next_(items.size(), -1) {}

    std::vector<std::int32_t> run() {
        for (std::int64_t rank = 0; rank < items_.size(); ++rank) push({{items_.cost(rank), rank, rank}});
        while (widest_.size() > 1) {
            const std::size_t first = pop(), second = pop();
            push(combine(partitions_[first], partitions_[second]));
        }
        std::vector<std::int32_t> bin_of_rank(items_.size(), 0);
        std::int32_t bin = 0;
        for (const Share& share : partitions_.back()) {
            for (std::int64_t rank = share.first; rank >= 0; rank = next_[rank]) bin_of_rank[rank] = bin;
            ++bin;
        }
        return bin_of_rank;
    }

   private:
    // What the costliest share costs more than the lightest; of equal partitions the older one comes first.
    void push(Shares shares) {
        widest_.emplace(shares[0].cost, -static_cast<std::int64_t>(partitions_.size()));
        partitions_.push_back(std::move(shares));
    }

    std::size_t pop() {
        const std::int64_t index = -widest_.top().second;
        widest_.pop();
        return static_cast<std::size_t>(index);
    }

    // The costliest shares of one go with the lightest of the other.
    Shares combine(const Shares& one, const Shares& other) {
        Shares combined(one);
        const auto num_kept = static_cast<std::int64_t>(one.size());
        for (std::int64_t place = static_cast<std::int64_t>(other.size()) - 1; place >= 0; --place) {
            const std::int64_t partner = num_bins_ - 1 - place;
            if (partner >= num_kept) {
                combined.push_back(other[place]);
            } else {
                combined[partner].cost += other[place].cost;
                next_[combined[partner].last] = other[place].first;
                combined[partner].last = other[place].last;
            }
        }
        std::stable_sort(combined.begin(), combined.end(), [](const Share& a, const Share& b) { return a.cost > b.cost; });
        if (static_cast<std::int64_t>(combined.size()) == num_bins_) {
            const std::int64_t least = combined.back().cost;
            for (Share& share : combined) share.cost -= least;
        }
        return combined;
    }

    const RankedItems& items_;
    const std::int64_t num_bins_;
    std::vector<std::int64_t> next_;  // of the chain that a rank is in; -1 at its end
    std::vector<Shares> partitions_;
    std::priority_queue<std::pair<std::int64_t, std::int64_t>> widest_;  // (difference, minus its place in `partitions_`)
};

}  // namespace

std::vector<std::int32_t> partition_by_differencing(const RankedItems& items, std::int64_t num_bins) {
    return Differencing(items, num_bins).run();
}

}  // namespace braid
