#include "bottleneck_matching.h"

#include <algorithm>
#include <limits>

namespace braid {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Kuhn's augmenting paths over the entries up to a threshold.
class ThresholdMatching {
public:
    ThresholdMatching(const Matrix& bottlenecks, double threshold)
        : bottlenecks_(bottlenecks), threshold_(threshold), row_of_column_(bottlenecks[0].size(), -1) {}

    bool is_complete() {
        for (std::size_t row = 0; row < bottlenecks_.size(); ++row) {
            seen_.assign(row_of_column_.size(), 0);
            if (!augment(row)) return false;
        }
        return true;
    }

private:
    bool augment(std::int64_t row) {
        for (std::size_t column = 0; column < row_of_column_.size(); ++column) {
            if (bottlenecks_[row][column] > threshold_ || seen_[column]) continue;
            seen_[column] = 1;
            if (row_of_column_[column] < 0 || augment(row_of_column_[column])) {
                row_of_column_[column] = row;
                return true;
            }
        }
        return false;
    }

    const Matrix& bottlenecks_;
    double threshold_;
    std::vector<std::int64_t> row_of_column_;
    std::vector<char> seen_;
};

double least_bottleneck(const Matrix& bottlenecks) {
    std::vector<double> candidates;
    for (const std::vector<double>& row : bottlenecks) candidates.insert(candidates.end(), row.begin(), row.end());
    std::sort(candidates.begin(), candidates.end());
    candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
    std::size_t low = 0, high = candidates.size() - 1;
    while (low < high) {
        const std::size_t middle = (low + high) / 2;
        if (ThresholdMatching(bottlenecks, candidates[middle]).is_complete()) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return candidates[low];
}

// Shortest augmenting paths; entries may be infinite as long as a finite matching exists.
std::vector<std::int64_t> least_cost_matching(const Matrix& costs) {
    const std::int64_t num_rows = costs.size(), num_columns = costs[0].size();
    std::vector<double> row_price(num_rows, 0.0), column_price(num_columns, 0.0), distance;
    std::vector<std::int64_t> row_of_column(num_columns, -1), column_of_row(num_rows, -1), before, done;
    std::vector<char> is_done;
    for (std::int64_t free_row = 0; free_row < num_rows; ++free_row) {
        distance.assign(num_columns, kInfinity);
        before.assign(num_columns, -1);
        is_done.assign(num_columns, 0);
        done.clear();
        std::int64_t row = free_row;
        double reached = 0.0;
        while (true) {
            std::int64_t nearest = -1;
            for (std::int64_t column = 0; column < num_columns; ++column) {
                if (is_done[column]) continue;
                const double candidate = reached + costs[row][column] - row_price[row] - column_price[column];
                if (candidate < distance[column]) distance[column] = candidate, before[column] = row;
                if (nearest < 0 || distance[column] < distance[nearest]) nearest = column;
            }
            reached = distance[nearest];
            is_done[nearest] = 1;
            done.push_back(nearest);
            if (row_of_column[nearest] < 0) break;
            row = row_of_column[nearest];
        }
        std::int64_t column = done.back();
        done.pop_back();
        row_price[free_row] += reached;
        for (std::int64_t each : done) {
            row_price[row_of_column[each]] += reached - distance[each];
            column_price[each] -= reached - distance[each];
        }
        do {
            row = before[column];
            row_of_column[column] = row;
            std::swap(column, column_of_row[row]);
        } while (row != free_row);
    }
    return column_of_row;
}

}  // namespace

std::vector<std::int64_t> match_bottleneck(const Matrix& bottlenecks, const Matrix& costs) {
    if (bottlenecks.empty()) return {};
    const double threshold = least_bottleneck(bottlenecks);
    Matrix allowed = costs;
    for (std::size_t row = 0; row < allowed.size(); ++row) {
        for (std::size_t column = 0; column < allowed[row].size(); ++column) {
            if (bottlenecks[row][column] > threshold) allowed[row][column] = kInfinity;
        }
    }
    return least_cost_matching(allowed);
}

}  // namespace braid
