#include "distribute_longest_first.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <tuple>
#include <utility>

#include "radix_sort.h"

namespace braid {

namespace {

using Integer = std::int64_t;

constexpr Integer kToleranceDivisor = 10000;

class Distribution {
  public:
    Distribution(View<Integer> workloads, Integer num_ranks) : workloads_(workloads), loads_(num_ranks, 0), blocks_(num_ranks) {}

    void place_longest_first(bool has_equal_counts) {
        const Integer num_blocks = workloads_.size, num_ranks = static_cast<Integer>(loads_.size());
        const Integer fair_count = has_equal_counts ? num_blocks / num_ranks : num_blocks;
        Integer num_extra = num_blocks - std::min(num_blocks, fair_count * num_ranks);
        for (auto& blocks : blocks_) blocks.reserve(num_blocks / num_ranks + 1);
        std::vector<LoadedRank> open;  // a heap, least loaded first
        for (Integer rank = 0; rank < num_ranks; ++rank) open.emplace_back(0, rank);
        for (Integer block : longest_first()) {
            while (is_full(open.front().second, fair_count, num_extra)) {
                open.front() = open.back();
                open.pop_back();
                sink_front(open);
            }
            const Integer rank = open.front().second;
            if (static_cast<Integer>(blocks_[rank].size()) == fair_count) --num_extra;
            blocks_[rank].push_back(block);
            loads_[rank] += workloads_[block];
            open.front().first = loads_[rank];
            sink_front(open);
        }
    }

    void exchange(Integer max_exchanges) {
        const Integer num_ranks = static_cast<Integer>(loads_.size());
        const Integer total = std::accumulate(loads_.begin(), loads_.end(), Integer{0});
        const Integer least = total / num_ranks + (total % num_ranks != 0);
        const Integer enough = least + least / kToleranceDivisor;
        while (max_exchanges-- > 0) {
            const Integer from = std::max_element(loads_.begin(), loads_.end()) - loads_.begin();
            if (loads_[from] <= enough || !exchange_from(from)) return;
        }
    }

    std::vector<std::int32_t> owners() const {
        std::vector<std::int32_t> owners(workloads_.size);
        for (std::size_t rank = 0; rank < blocks_.size(); ++rank) {
            for (Integer block : blocks_[rank]) owners[block] = static_cast<std::int32_t>(rank);
        }
        return owners;
    }

  private:
    using LoadedRank = std::pair<Integer, Integer>;  // (load, rank)

    // Blocks by descending workload, then by index.
    std::vector<Integer> longest_first() const {
        const Integer num_blocks = workloads_.size;
        std::vector<Integer> order(num_blocks);
        if (num_blocks == 0) return order;
        const auto most = static_cast<std::uint64_t>(*std::max_element(workloads_.data, workloads_.data + num_blocks));
        const int block_bits = bit_width(static_cast<std::uint64_t>(num_blocks)), workload_bits = bit_width(most);
        if (block_bits + workload_bits > 64 || block_bits > 32) {
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](Integer a, Integer b) { return workloads_[a] > workloads_[b]; });
            return order;
        }
        std::vector<std::uint64_t> keys(num_blocks), spare;
        for (Integer block = 0; block < num_blocks; ++block) {
            const auto shortfall = most - static_cast<std::uint64_t>(workloads_[block]);
            keys[block] = shortfall << block_bits | static_cast<std::uint64_t>(block);
        }
        radix_sort(keys, spare, std::uint64_t{0}, block_bits, workload_bits);
        const std::uint64_t mask = (std::uint64_t{1} << block_bits) - 1;
        for (Integer place = 0; place < num_blocks; ++place) order[place] = static_cast<Integer>(keys[place] & mask);
        return order;
    }

    // Restores a heap whose first entry may have grown.
    static void sink_front(std::vector<LoadedRank>& heap) {
        std::size_t place = 0;
        while (2 * place + 1 < heap.size()) {
            std::size_t child = 2 * place + 1;
            if (child + 1 < heap.size() && heap[child + 1] < heap[child]) ++child;
            if (!(heap[child] < heap[place])) return;
            std::swap(heap[place], heap[child]);
            place = child;
        }
    }

    bool is_full(Integer rank, Integer fair_count, Integer num_extra) const {
        return static_cast<Integer>(blocks_[rank].size()) >= fair_count + (num_extra > 0);
    }

    // Exchanges a block of a rank for a shorter one of the least loaded rank with which that lessens the larger load.
    bool exchange_from(Integer from) {
        std::vector<Integer> order(loads_.size());
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(),
                  [&](Integer a, Integer b) { return std::tie(loads_[a], a) < std::tie(loads_[b], b); });
        for (Integer to : order) {
            const Integer surplus = loads_[from] - loads_[to];
            if (surplus < 2) return false;
            const auto [give, take] = best_pair(from, to, surplus);
            if (give < 0) continue;
            const Integer given = blocks_[from][give], taken = blocks_[to][take], moved = workloads_[given] - workloads_[taken];
            loads_[from] -= moved;
            loads_[to] += moved;
            replace(from, give, taken);
            replace(to, take, given);
            return true;
        }
        return false;
    }

    // Positions of two blocks whose difference is above 0, below the surplus and nearest to its half; then the first ones.
    std::pair<Integer, Integer> best_pair(Integer from, Integer to, Integer surplus) const {
        const auto &mine = blocks_[from], &theirs = blocks_[to];
        std::tuple<Integer, Integer, Integer> best{surplus, -1, -1};  // (2 x distance to half of the surplus, positions)
        std::size_t take = 0;
        for (std::size_t give = 0; give < mine.size(); ++give) {
            // Both descend: the first block of theirs that is shorter than mine by half of the surplus, and the one before it.
            const Integer workload = workloads_[mine[give]];
            while (take < theirs.size() && 2 * (workload - workloads_[theirs[take]]) < surplus) ++take;
            for (std::size_t each = take > 0 ? take - 1 : 0; each < std::min(take + 1, theirs.size()); ++each) {
                const Integer distance = std::abs(2 * (workload - workloads_[theirs[each]]) - surplus);
                best = std::min(best, {distance, static_cast<Integer>(give), static_cast<Integer>(each)});
            }
        }
        return {std::get<1>(best), std::get<2>(best)};
    }

    // Puts another block in the place of one, where its workload belongs: blocks descend by workload, then ascend by index.
    void replace(Integer rank, Integer position, Integer block) {
        auto& blocks = blocks_[rank];
        blocks.erase(blocks.begin() + position);
        blocks.insert(std::lower_bound(blocks.begin(), blocks.end(), block,
                                       [&](Integer a, Integer b) {
                                           return std::make_pair(-workloads_[a], a) < std::make_pair(-workloads_[b], b);
                                       }),
                      block);
    }

    const View<Integer> workloads_;
    std::vector<Integer> loads_;
    std::vector<std::vector<Integer>> blocks_;  // of each rank, longest first
};

}  // namespace

std::vector<std::int32_t> distribute_longest_first(View<Integer> workloads, Integer num_ranks, bool has_equal_counts,
                                                   Integer max_exchanges) {
    Distribution distribution(workloads, num_ranks);
    distribution.place_longest_first(has_equal_counts);
    distribution.exchange(max_exchanges);
    return distribution.owners();
}

}  // namespace braid
