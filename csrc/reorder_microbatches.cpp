#include "reorder_microbatches.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace braid {

namespace {

using Order = std::vector<std::int64_t>;

std::vector<double> total_seconds(const PipelineShape& shape) {
    std::vector<double> totals(shape.num_microbatches, 0.0);
    for (std::int64_t stage = 0; stage < shape.num_virtual_stages; ++stage) {
        for (std::int64_t microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
            totals[microbatch] += shape.seconds(true, stage, microbatch);
            totals[microbatch] += shape.seconds(false, stage, microbatch);
        }
    }
    return totals;
}

// DistTrain's order; by_size: microbatches from the smallest to the largest.
Order fill_intervals(const PipelineShape& shape, const Order& by_size) {
    std::vector<double> first_stage(shape.num_microbatches, 0.0);
    for (std::int64_t stage = 0; stage < shape.num_virtual_stages; stage += shape.num_stages) {
        for (std::int64_t each = 0; each < shape.num_microbatches; ++each) first_stage[each] += shape.seconds(true, stage, each);
    }
    const std::int64_t num_ends = std::min(shape.num_stages, shape.num_microbatches);
    Order pending(by_size.begin() + num_ends, by_size.end());
    std::sort(pending.begin(), pending.end());
    PipelineRecursion recursion(shape);
    Order order{by_size[0]};
    recursion.append(by_size[0]);
    while (!pending.empty()) {
        const double interval = recursion.interval();
        const auto closest = std::min_element(pending.begin(), pending.end(), [&](std::int64_t a, std::int64_t b) {
            return std::abs(first_stage[a] - interval) < std::abs(first_stage[b] - interval);
        });
        recursion.append(*closest);
        order.push_back(*closest);
        pending.erase(closest);
    }
    for (std::int64_t rank = num_ends - 1; rank > 0; --rank) order.push_back(by_size[rank]);
    return order;
}

// Knuth's MMIX linear congruential generator: the same numbers everywhere.
class Positions {
public:
    explicit Positions(std::int64_t num_positions) : num_positions_(num_positions) {}

    std::int64_t next() {
        state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<std::int64_t>((state_ >> 33) % static_cast<std::uint64_t>(num_positions_));
    }

private:
    std::int64_t num_positions_;
    std::uint64_t state_ = 0;
};

}  // namespace

std::vector<std::int64_t> reorder_microbatches(const PipelineShape& shape, std::int64_t num_swaps) {
    const std::vector<double> totals = total_seconds(shape);
    Order given(shape.num_microbatches);
    std::iota(given.begin(), given.end(), 0);
    Order ascending = given, descending = given;
    std::stable_sort(ascending.begin(), ascending.end(), [&](std::int64_t a, std::int64_t b) { return totals[a] < totals[b]; });
    std::stable_sort(descending.begin(), descending.end(), [&](std::int64_t a, std::int64_t b) { return totals[a] > totals[b]; });

    PipelineEnd end_of(shape);
    const double given_end = end_of(given);
    Order best = given;
    double best_end = given_end;
    for (const Order& order : {fill_intervals(shape, ascending), ascending, descending}) {
        const double end = end_of(order);
        if (end < best_end) best = order, best_end = end;
    }
    Positions positions(shape.num_microbatches);
    for (std::int64_t swap = 0; swap < num_swaps; ++swap) {
        const std::int64_t first = positions.next(), then = positions.next();
        std::swap(best[first], best[then]);
        const double end = end_of(best);
        if (end <= best_end) {
            best_end = end;
        } else {
            std::swap(best[first], best[then]);
        }
    }
    return best_end < given_end ? best : given;
}

}  // namespace braid
