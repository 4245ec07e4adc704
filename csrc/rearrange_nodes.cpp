#include "rearrange_nodes.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>

namespace braid {

namespace {

using Integer = std::int64_t;

struct Entry {
    Integer rank, volume;
};

// What each node's ranks hold of each batch.
class Volumes {
  public:
    Volumes(View<Integer> row_starts, View<Integer> batches, View<Integer> volumes, Integer ranks_per_node)
        : row_starts(row_starts), batches(batches), volumes(volumes), num_ranks(row_starts.size - 1),
          ranks_per_node(ranks_per_node), num_nodes((num_ranks + ranks_per_node - 1) / ranks_per_node), column_starts_(num_ranks + 1), entries_(batches.size) {
        for (Integer entry = 0; entry < batches.size; ++entry) ++column_starts_[batches[entry] + 1];
        for (Integer batch = 0; batch < num_ranks; ++batch) column_starts_[batch + 1] += column_starts_[batch];
        std::vector<Integer> next(column_starts_.begin(), column_starts_.end() - 1);
        for (Integer rank = 0; rank < num_ranks; ++rank) {
            for (Integer entry = row_starts[rank]; entry < row_starts[rank + 1]; ++entry) {
                entries_[next[batches[entry]]++] = {rank, volumes[entry]};
            }
        }
    }

    Integer first_rank(Integer node) const { return node * ranks_per_node; }
    Integer num_ranks_of(Integer node) const { return std::min(ranks_per_node, num_ranks - first_rank(node)); }

    // Calls visit(rank, volume) for the ranks of a node that hold some of a batch.
    template <typename Visit>
    void visit(Integer batch, Integer node, Visit visit) const {
        const Integer first = first_rank(node), last = first + ranks_per_node;
        const auto end = entries_.begin() + column_starts_[batch + 1];
        auto entry = std::lower_bound(entries_.begin() + column_starts_[batch], end, first,
                                      [](const Entry& each, Integer rank) { return each.rank < rank; });
        for (; entry != end && entry->rank < last; ++entry) visit(entry->rank, entry->volume);
    }

    const View<Integer> row_starts, batches, volumes;
    const Integer num_ranks, ranks_per_node, num_nodes;

  private:
    std::vector<Integer> column_starts_;
    std::vector<Entry> entries_;  // by batch, then by rank
};

// Batch j on the node of rank j.
std::vector<Integer> identity_nodes(const Volumes& volumes) {
    std::vector<Integer> nodes(volumes.num_ranks);
    for (Integer batch = 0; batch < volumes.num_ranks; ++batch) nodes[batch] = batch / volumes.ranks_per_node;
    return nodes;
}

// The rank with most left to send gets the free batch of which it holds most, again and again.
std::vector<Integer> greedy_nodes(const Volumes& volumes) {
    struct Want {
        Integer volume, batch;
        bool operator<(const Want& other) const { return std::tie(volume, other.batch) < std::tie(other.volume, batch); }
    };
    std::vector<Integer> nodes(volumes.num_ranks, -1), room(volumes.num_nodes), left(volumes.num_ranks, 0);
    std::vector<std::vector<Want>> wants(volumes.num_ranks);  // heaps: most volume first, then the first batch
    std::priority_queue<std::pair<Integer, Integer>> senders;  // (left to send, -rank)
    for (Integer node = 0; node < volumes.num_nodes; ++node) room[node] = volumes.num_ranks_of(node);
    for (Integer rank = 0; rank < volumes.num_ranks; ++rank) {
        for (Integer entry = volumes.row_starts[rank]; entry < volumes.row_starts[rank + 1]; ++entry) {
            left[rank] += volumes.volumes[entry];
            wants[rank].push_back({volumes.volumes[entry], volumes.batches[entry]});
        }
        std::make_heap(wants[rank].begin(), wants[rank].end());
        senders.emplace(left[rank], -rank);
    }
    while (!senders.empty()) {
        const auto [volume, minus_rank] = senders.top();
        const Integer rank = -minus_rank, node = rank / volumes.ranks_per_node;
        senders.pop();
        if (volume != left[rank]) {
            senders.emplace(left[rank], minus_rank);
            continue;
        }
        auto& heap = wants[rank];
        while (!heap.empty() && nodes[heap.front().batch] >= 0) {
            std::pop_heap(heap.begin(), heap.end());
            heap.pop_back();
        }
        if (room[node] == 0 || heap.empty()) continue;
        const Integer batch = heap.front().batch;
        nodes[batch] = node;
        --room[node];
        volumes.visit(batch, node, [&](Integer holder, Integer held) { left[holder] -= held; });
        senders.emplace(left[rank], minus_rank);
    }
    // Batches that nobody asked for stay if they can.
    for (Integer batch = 0; batch < volumes.num_ranks; ++batch) {
        const Integer own = batch / volumes.ranks_per_node;
        if (nodes[batch] < 0 && room[own] > 0) {
            nodes[batch] = own;
            --room[own];
        }
    }
    Integer open_node = 0;
    for (Integer& node : nodes) {
        if (node >= 0) continue;
        while (room[open_node] == 0) ++open_node;
        node = open_node;
        --room[open_node];
    }
    return nodes;
}

struct Swap {
    Integer peak, out, in;  // the most that a rank of the two nodes sends afterwards; batch that leaves, batch that comes
    bool operator<(const Swap& other) const { return std::tie(peak, out, in) < std::tie(other.peak, other.out, other.in); }
};

// The most that any rank sends, how many ranks send that much, and the first of them.
struct Worst {
    Integer sent, count, rank;
    bool improves(const Worst& other) const { return std::tie(sent, count) < std::tie(other.sent, other.count); }
};

class NodeSearch {
  public:
    NodeSearch(const Volumes& volumes, const NodeSearchLimits& limits, std::vector<Integer> nodes)
        : volumes_(volumes), limits_(limits), nodes_(std::move(nodes)), sent_(volumes.num_ranks, 0), members_(volumes.num_nodes),
          is_moved_(volumes.num_ranks, false), scratch_(volumes.ranks_per_node) {
        for (Integer rank = 0; rank < volumes.num_ranks; ++rank) {
            members_[nodes_[rank]].push_back(rank);
            for (Integer entry = volumes.row_starts[rank]; entry < volumes.row_starts[rank + 1]; ++entry) {
                if (nodes_[volumes.batches[entry]] != rank / volumes.ranks_per_node) sent_[rank] += volumes.volumes[entry];
            }
        }
    }

    Worst worst() const {
        Worst found{-1, 0, -1};
        for (Integer rank = 0; rank < volumes_.num_ranks; ++rank) {
            if (sent_[rank] > found.sent) {
                found = {sent_[rank], 1, rank};
            } else if (sent_[rank] == found.sent) {
                ++found.count;
            }
        }
        return found;
    }

    // Shortens chain by chain what the worst rank sends, until no chain does or the evaluations are used up.
    std::vector<Integer> run() {
        for (Worst now = worst(); now.sent > 0 && improve(now);) now = worst();
        return std::move(nodes_);
    }

  private:
    // Tries chains of swaps; each swap helps the rank that is worst at that moment. Keeps the first chain after which the worst
    // is better than before it, undoes the others.
    bool improve(const Worst& before) {
        for (const Swap& first : swaps_for(before.rank, limits_.num_first_swaps)) {
            if (follow(first, before)) return true;
        }
        return false;
    }

    bool follow(Swap swap, const Worst& before) {
        std::vector<Swap> done;
        bool improved = false;
        while (true) {
            exchange(swap.out, swap.in);
            is_moved_[swap.out] = is_moved_[swap.in] = true;
            done.push_back(swap);
            const Worst now = worst();
            improved = now.improves(before);
            if (improved || static_cast<Integer>(done.size()) == limits_.max_chain_length) break;
            const std::vector<Swap> next = swaps_for(now.rank, 1);
            if (next.empty()) break;
            swap = next.front();
        }
        for (auto each = done.rbegin(); each != done.rend(); ++each) {
            is_moved_[each->out] = is_moved_[each->in] = false;
            if (!improved) exchange(each->in, each->out);
        }
        return improved;
    }

    // Returns the best swaps that lessen what a rank sends, best first; none once the evaluations are used up.
    std::vector<Swap> swaps_for(Integer rank, Integer num_swaps) {
        std::vector<Swap> swaps;
        if (num_evaluations_ >= limits_.max_evaluations) return swaps;
        const Integer node = rank / volumes_.ranks_per_node;
        Integer limit = std::numeric_limits<Integer>::max();
        for (Integer entry = volumes_.row_starts[rank]; entry < volumes_.row_starts[rank + 1]; ++entry) {
            const Integer in = volumes_.batches[entry];
            if (nodes_[in] == node || is_moved_[in]) continue;
            for (Integer out : members_[node]) {
                if (is_moved_[out] || held(rank, out) >= volumes_.volumes[entry]) continue;
                ++num_evaluations_;
                Integer peak = peak_after(node, out, in);
                if (peak > limit) continue;
                peak = std::max(peak, peak_after(nodes_[in], in, out));
                if (peak > limit) continue;
                swaps.push_back({peak, out, in});
                if (static_cast<Integer>(swaps.size()) < 2 * num_swaps) continue;
                std::nth_element(swaps.begin(), swaps.begin() + (num_swaps - 1), swaps.end());
                swaps.resize(num_swaps);
                limit = swaps.back().peak;
            }
        }
        std::sort(swaps.begin(), swaps.end());
        if (static_cast<Integer>(swaps.size()) > num_swaps) swaps.resize(num_swaps);
        return swaps;
    }

    // What a rank holds of a batch.
    Integer held(Integer rank, Integer batch) const {
        const Integer* const begin = volumes_.batches.data + volumes_.row_starts[rank];
        const Integer* const end = volumes_.batches.data + volumes_.row_starts[rank + 1];
        const Integer* const found = std::lower_bound(begin, end, batch);
        return found != end && *found == batch ? volumes_.volumes[found - volumes_.batches.data] : 0;
    }

    Integer peak_after(Integer node, Integer out, Integer in) {
        const Integer first = volumes_.first_rank(node), num_ranks = volumes_.num_ranks_of(node);
        std::copy_n(sent_.begin() + first, num_ranks, scratch_.begin());
        volumes_.visit(out, node, [&](Integer rank, Integer volume) { scratch_[rank - first] += volume; });
        volumes_.visit(in, node, [&](Integer rank, Integer volume) { scratch_[rank - first] -= volume; });
        return *std::max_element(scratch_.begin(), scratch_.begin() + num_ranks);
    }

    // Two batches change places.
    void exchange(Integer one, Integer other) {
        const Integer node_of_one = nodes_[one], node_of_other = nodes_[other];
        move(one, node_of_one, node_of_other);
        move(other, node_of_other, node_of_one);
    }

    void move(Integer batch, Integer from, Integer to) {
        volumes_.visit(batch, from, [&](Integer rank, Integer volume) { sent_[rank] += volume; });
        volumes_.visit(batch, to, [&](Integer rank, Integer volume) { sent_[rank] -= volume; });
        auto& left = members_[from];
        left.erase(std::find(left.begin(), left.end(), batch));
        members_[to].push_back(batch);
        nodes_[batch] = to;
    }

    const Volumes& volumes_;
    const NodeSearchLimits limits_;
    std::vector<Integer> nodes_, sent_;
    std::vector<std::vector<Integer>> members_;
    std::vector<bool> is_moved_;  // by the chain at hand
    std::vector<Integer> scratch_;
    Integer num_evaluations_ = 0;
};

}  // namespace

std::vector<Integer> rearrange_nodes(View<Integer> row_starts, View<Integer> batches, View<Integer> volumes_held,
                                     Integer ranks_per_node, const NodeSearchLimits& limits) {
    const Volumes volumes(row_starts, batches, volumes_held, ranks_per_node);
    NodeSearch identity(volumes, limits, identity_nodes(volumes)), greedy(volumes, limits, greedy_nodes(volumes));
    return greedy.worst().sent < identity.worst().sent ? greedy.run() : identity.run();
}

}  // namespace braid
