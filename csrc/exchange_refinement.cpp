#include "exchange_refinement.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

namespace braid {

namespace {

using Ranks = std::vector<std::uint32_t>;

// The costly bin gives its item at place `give` and gets the cheap one's at place `take`, or nothing when that is past its end.
struct Exchange {
    std::size_t give = 0, take = 0;
    std::int64_t costlier;  // what the costlier of the two bins costs afterwards

    void offer(std::int64_t cost, std::size_t give_place, std::size_t take_place) {
        if (cost < costlier) *this = {give_place, take_place, cost};
    }
};

class Refinement {
   public:
    Refinement(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin,
               std::vector<std::int32_t>& bin_of_rank)
        : items_(items),
          limit_(max_items_per_bin),
          bin_of_rank_(bin_of_rank),
          costs_(num_bins),
          collected_(num_bins),
          members_(num_bins) {
        for (std::int64_t rank = 0; rank < items.size(); ++rank) costs_[bin_of_rank[rank]] += items.additive[rank];
        if (padded()) add_padding();
    }

    void run(std::int64_t bound, std::int64_t& num_steps) {
        if (*std::max_element(costs_.begin(), costs_.end()) <= bound + bound / kGoodEnough) return;
        sort_by_bin();
        sort_by_cost();
        while (num_steps > 0 && by_cost_.rbegin()->first > bound + bound / kGoodEnough) {
            if (!relieve_costliest(num_steps)) return;
        }
    }

   private:
    bool padded() const { return !items_.padded.empty(); }

    void add_padding() {
        std::vector<std::int64_t> longest(costs_.size(), -1);
        for (std::int64_t rank = 0; rank < items_.size(); ++rank) {
            std::int64_t& padded = longest[bin_of_rank_[rank]];
            if (padded < 0) padded = items_.padded[rank];
            costs_[bin_of_rank_[rank]] += padded;
        }
    }

    void sort_by_cost() {
        std::vector<std::pair<std::int64_t, std::int32_t>> sorted;
        for (std::size_t bin = 0; bin < costs_.size(); ++bin) sorted.emplace_back(costs_[bin], bin);
        std::sort(sorted.begin(), sorted.end());
        by_cost_ = {sorted.begin(), sorted.end()};  // linear, as they are in order
    }

    void sort_by_bin() {
        starts_.assign(costs_.size() + 1, 0);
        for (std::int32_t bin : bin_of_rank_) ++starts_[bin + 1];
        for (std::size_t bin = 0; bin < costs_.size(); ++bin) starts_[bin + 1] += starts_[bin];
        Ranks ends(starts_.begin(), starts_.end() - 1);
        rank_by_bin_.resize(bin_of_rank_.size());
        for (std::size_t rank = 0; rank < bin_of_rank_.size(); ++rank) {
            rank_by_bin_[ends[bin_of_rank_[rank]]++] = static_cast<std::uint32_t>(rank);
        }
    }

    // Few bins of a large batch are ever touched.
    void collect_members(std::int32_t bin) {
        if (collected_[bin]) return;
        collected_[bin] = 1;
        members_[bin].assign(rank_by_bin_.begin() + starts_[bin], rank_by_bin_.begin() + starts_[bin + 1]);
    }

    // Tries the others from the cheapest on; applies the best exchange with the first one that has any.
    bool relieve_costliest(std::int64_t& num_steps) {
        const auto [cost, costly] = *by_cost_.rbegin();
        collect_members(costly);
        for (const auto& [cheap_cost, cheap] : by_cost_) {
            if (cheap_cost >= cost || num_steps <= 0) return false;
            collect_members(cheap);
            Exchange best{0, 0, cost};
            if (padded()) {
                search_pairs(costly, cheap, best, num_steps);
            } else {
                search_differences(costly, cheap, best, num_steps);
            }
            if (best.costlier < cost) {
                apply(costly, cheap, best);
                return true;
            }
        }
        return false;
    }

    // Both lists descend, so the item whose exchange comes closest to halving the difference moves one way only.
    void search_differences(std::int32_t costly, std::int32_t cheap, Exchange& best, std::int64_t& num_steps) const {
        const Ranks &givers = members_[costly], &takers = members_[cheap];
        const std::int64_t difference = costs_[costly] - costs_[cheap];
        const bool may_move = static_cast<std::int64_t>(takers.size()) < limit_;
        const auto moved = [&](std::size_t give, std::size_t take) {
            return items_.additive[givers[give]] - (take < takers.size() ? items_.additive[takers[take]] : 0);
        };
        std::size_t take = 0;
        for (std::size_t give = 0; give < givers.size(); ++give) {
            while (take < takers.size() && 2 * moved(give, take) < difference) ++take;
            if (take < takers.size() || may_move) offer_moved(costly, cheap, moved(give, take), give, take, best);
            if (take > 0) offer_moved(costly, cheap, moved(give, take - 1), give, take - 1, best);
        }
        num_steps -= static_cast<std::int64_t>(givers.size() + takers.size());
    }

    void offer_moved(std::int32_t costly, std::int32_t cheap, std::int64_t moved, std::size_t give, std::size_t take,
                     Exchange& best) const {
        best.offer(std::max(costs_[costly] - moved, costs_[cheap] + moved), give, take);
    }

    void search_pairs(std::int32_t costly, std::int32_t cheap, Exchange& best, std::int64_t& num_steps) const {
        const Ranks &givers = members_[costly], &takers = members_[cheap];
        const std::size_t num_takes = takers.size() + (static_cast<std::int64_t>(takers.size()) < limit_);
        for (std::size_t give = 0; give < givers.size(); ++give) {
            for (std::size_t take = 0; take < num_takes; ++take) {
                best.offer(std::max(cost_after(costly, give, cheap, take), cost_after(cheap, take, costly, give)), give, take);
            }
        }
        num_steps -= static_cast<std::int64_t>(givers.size() * num_takes);
    }

    // Cost of `bin` without its item at `lost` but with the other's at `gained`; a place past the end is no item.
    std::int64_t cost_after(std::int32_t bin, std::size_t lost, std::int32_t other, std::size_t gained) const {
        const Ranks &own = members_[bin], &others = members_[other];
        std::int64_t count = static_cast<std::int64_t>(own.size());
        std::int64_t additive = costs_[bin] - (own.empty() ? 0 : count * items_.padded[own[0]]);
        std::uint32_t longest = UINT32_MAX;
        if (own.size() > (lost == 0 ? 1 : 0)) longest = own[lost == 0 ? 1 : 0];
        if (lost < own.size()) {
            additive -= items_.additive[own[lost]];
            --count;
        }
        if (gained < others.size()) {
            additive += items_.additive[others[gained]];
            longest = std::min(longest, others[gained]);
            ++count;
        }
        return count == 0 ? 0 : additive + count * items_.padded[longest];
    }

    void apply(std::int32_t costly, std::int32_t cheap, const Exchange& exchange) {
        const std::int64_t costly_after = cost_with(costly, exchange.give, cheap, exchange.take);
        const std::int64_t cheap_after = cost_with(cheap, exchange.take, costly, exchange.give);
        Ranks &givers = members_[costly], &takers = members_[cheap];
        const std::uint32_t given = givers[exchange.give];
        const bool swaps = exchange.take < takers.size();
        const std::uint32_t taken = swaps ? takers[exchange.take] : 0;
        givers.erase(givers.begin() + exchange.give);
        if (swaps) takers.erase(takers.begin() + exchange.take);
        insert(cheap, given);
        if (swaps) insert(costly, taken);
        set_cost(costly, costly_after);
        set_cost(cheap, cheap_after);
    }

    std::int64_t cost_with(std::int32_t bin, std::size_t lost, std::int32_t other, std::size_t gained) const {
        if (padded()) return cost_after(bin, lost, other, gained);
        const Ranks &own = members_[bin], &others = members_[other];
        return costs_[bin] - (lost < own.size() ? items_.additive[own[lost]] : 0) +
               (gained < others.size() ? items_.additive[others[gained]] : 0);
    }

    void insert(std::int32_t bin, std::uint32_t rank) {
        Ranks& members = members_[bin];
        members.insert(std::lower_bound(members.begin(), members.end(), rank), rank);
        bin_of_rank_[rank] = bin;
    }

    void set_cost(std::int32_t bin, std::int64_t cost) {
        by_cost_.erase({costs_[bin], bin});
        by_cost_.emplace(cost, bin);
        costs_[bin] = cost;
    }

    const RankedItems& items_;
    const std::int64_t limit_;
    std::vector<std::int32_t>& bin_of_rank_;
    std::vector<std::int64_t> costs_;
    Ranks starts_, rank_by_bin_;  // the items of each bin as they were at first
    std::vector<char> collected_;
    std::vector<Ranks> members_;  // ascending ranks, hence descending costs
    std::set<std::pair<std::int64_t, std::int32_t>> by_cost_;
};

}  // namespace

void refine_by_exchange(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin, std::int64_t bound,
                        std::int64_t& num_steps, std::vector<std::int32_t>& bin_of_rank) {
    if (num_steps <= 0) return;
    Refinement(items, num_bins, max_items_per_bin, bin_of_rank).run(bound, num_steps);
}

}  // namespace braid
