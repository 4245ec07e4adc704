#include "replica_assignment.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "sample_exchange.h"

namespace braid {

namespace {

Samples assign_by_llm_load(const double* llm, const UnitLoads& encoders, const Samples& everyone, std::int64_t num_replicas) {
    using Replica = std::tuple<double, double, std::int64_t, std::int64_t>;  // LLM load, encoder share, count, index
    const std::vector<double> shares = dominant_shares(encoders, everyone);
    std::priority_queue<Replica, std::vector<Replica>, std::greater<Replica>> least;
    for (std::int64_t replica = 0; replica < num_replicas; ++replica) least.emplace(0.0, 0.0, 0, replica);
    Samples replicas(everyone.size());
    for (std::int64_t sample : sorted_descending(shares)) {
        const auto [llm_load, encoder_share, count, replica] = least.top();
        least.pop();
        least.emplace(llm_load + llm[sample], encoder_share + shares[sample], count + 1, replica);
        replicas[sample] = replica;
    }
    return replicas;
}

// Each sample to where the pressure of the units that it needs is then least. Every unit lists the replicas by their load in it;
// the lists are followed side by side, until what follows in one of them could only be worse.
class JointAssignment {
   public:
    JointAssignment(const Pressures& pressures, std::int64_t num_replicas)
        : pressures_(pressures),
          num_replicas_(num_replicas),
          loads_(pressures.size(), std::vector<double>(num_replicas, 0.0)),
          weight_(num_replicas, 0.0),
          count_(num_replicas, 0),
          by_load_(pressures.size()) {}

    Samples run() {
        const std::size_t num_samples = pressures_[0].size();
        std::vector<double> weights(num_samples, 0.0);
        for (const std::vector<double>& own : pressures_)
            for (std::size_t sample = 0; sample < num_samples; ++sample) weights[sample] = std::max(weights[sample], own[sample]);
        Samples replicas(num_samples);
        std::int64_t next_empty = 0;
        for (const std::int64_t sample : sorted_descending(weights)) {
            const std::int64_t replica = next_empty < num_replicas_ ? next_empty++ : best_for(sample);
            add(sample, replica, weights[sample]);
            replicas[sample] = replica;
        }
        return replicas;
    }

   private:
    using Rank = std::tuple<double, double, std::int64_t, std::int64_t>;  // pressure, weight, count, index

    Rank rank(std::int64_t sample, std::int64_t replica) const {
        double largest = 0.0;
        for (const std::size_t unit : needed_) largest = std::max(largest, loads_[unit][replica] + pressures_[unit][sample]);
        return {largest, weight_[replica], count_[replica], replica};
    }

    std::int64_t best_for(std::int64_t sample) {
        needed_.clear();
        for (std::size_t unit = 0; unit < pressures_.size(); ++unit)
            if (pressures_[unit][sample] > 0) needed_.push_back(unit);
        Rank best = rank(sample, 0);
        if (needed_.empty()) {
            for (std::int64_t replica = 1; replica < num_replicas_; ++replica) best = std::min(best, rank(sample, replica));
            return std::get<3>(best);
        }
        next_.clear();
        for (const std::size_t unit : needed_) next_.push_back(by_load_[unit].begin());
        while (true) {
            for (std::size_t place = 0; place < needed_.size(); ++place) {
                if (next_[place] == by_load_[needed_[place]].end()) return std::get<3>(best);
                const auto [load, replica] = *next_[place]++;
                if (load + pressures_[needed_[place]][sample] > std::get<0>(best)) return std::get<3>(best);
                best = std::min(best, rank(sample, replica));
            }
        }
    }

    void add(std::int64_t sample, std::int64_t replica, double weight) {
        for (std::size_t unit = 0; unit < pressures_.size(); ++unit) {
            double& load = loads_[unit][replica];
            if (count_[replica] > 0) by_load_[unit].erase({load, replica});
            load += pressures_[unit][sample];
            by_load_[unit].emplace(load, replica);
        }
        weight_[replica] += weight;
        ++count_[replica];
    }

    using ByLoad = std::set<std::pair<double, std::int64_t>>;

    const Pressures& pressures_;
    const std::int64_t num_replicas_;
    std::vector<std::vector<double>> loads_;  // [unit][replica]
    std::vector<double> weight_;
    Samples count_;
    std::vector<ByLoad> by_load_;
    std::vector<std::size_t> needed_;  // by the sample at hand
    std::vector<ByLoad::const_iterator> next_;
};

double heaviest_pressure(const Pressures& pressures, const Samples& replicas, std::int64_t num_replicas) {
    double heaviest = 0.0;
    for (const std::vector<double>& own : pressures) {
        std::vector<double> of_replica(num_replicas, 0.0);
        for (std::size_t sample = 0; sample < replicas.size(); ++sample) of_replica[replicas[sample]] += own[sample];
        heaviest = std::max(heaviest, *std::max_element(of_replica.begin(), of_replica.end()));
    }
    return heaviest;
}

// The loads of a unit relative to what the heaviest replica has at least.
std::vector<double> pressures_of(const double* loads, const Samples& everyone, std::int64_t num_replicas) {
    const double most = *std::max_element(loads, loads + everyone.size());
    const double least = std::max(sum_in_order(loads, everyone) / static_cast<double>(num_replicas), most);
    std::vector<double> pressures(everyone.size(), 0.0);
    if (least > 0) std::transform(loads, loads + everyone.size(), pressures.begin(), [&](double load) { return load / least; });
    return pressures;
}

}  // namespace

Samples assign_replicas(const double* llm, const UnitLoads& encoders, std::int64_t num_samples, std::int64_t num_replicas) {
    Samples everyone(num_samples);
    std::iota(everyone.begin(), everyone.end(), 0);
    Pressures pressures{pressures_of(llm, everyone, num_replicas)};
    for (const double* loads : encoders) pressures.push_back(pressures_of(loads, everyone, num_replicas));
    Samples best = assign_by_llm_load(llm, encoders, everyone, num_replicas);
    Samples joint = JointAssignment(pressures, num_replicas).run();
    if (heaviest_pressure(pressures, joint, num_replicas) < heaviest_pressure(pressures, best, num_replicas)) best.swap(joint);
    exchange_samples(pressures, num_replicas, best);
    return best;
}

}  // namespace braid
