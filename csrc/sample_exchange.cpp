#include "sample_exchange.h"

#include <algorithm>
#include <set>
#include <utility>

namespace braid {

namespace {

constexpr double kEvenEnough = 1.001;
constexpr std::int64_t kStepsPerSample = 128, kLeastSteps = 1 << 14;

// The heavy replica gives its sample at place `give` and gets the light one's at `take`, or nothing when that is past its end.
struct Exchange {
    double heavier;  // the larger pressure of the two afterwards
    std::size_t give, take;
};

class SampleExchange {
   public:
    SampleExchange(const Pressures& pressures, std::int64_t num_replicas, Samples& replicas)
        : num_units_(pressures.size()), own_(replicas.size() * num_units_), replicas_(replicas), members_(num_replicas),
          loads_(num_replicas, std::vector<double>(num_units_, 0.0)) {
        for (std::size_t sample = 0; sample < replicas.size(); ++sample) {
            for (std::size_t unit = 0; unit < num_units_; ++unit) own_[sample * num_units_ + unit] = pressures[unit][sample];
            members_[replicas[sample]].push_back(static_cast<std::int64_t>(sample));
        }
        for (std::int64_t replica = 0; replica < num_replicas; ++replica) list(replica);
    }

    void run() {
        auto num_steps = kLeastSteps + kStepsPerSample * static_cast<std::int64_t>(replicas_.size());
        while (num_steps > 0 && by_pressure_.rbegin()->first > kEvenEnough) {
            if (!relieve_heaviest(num_steps)) return;
        }
    }

   private:
    bool relieve_heaviest(std::int64_t& num_steps) {
        const auto [most, heavy] = *by_pressure_.rbegin();
        for (const auto& [pressure, light] : by_pressure_) {
            if (pressure >= most || num_steps <= 0) return false;
            const Exchange best = find_exchange(heavy, light, num_steps);
            if (!(best.heavier < most)) continue;
            apply(best, heavy, light);
            return true;
        }
        return false;
    }

    // The first exchange that closes a quarter of the gap between the two, else the best of all.
    Exchange find_exchange(std::int64_t heavy, std::int64_t light, std::int64_t& num_steps) const {
        const Samples &givers = members_[heavy], &takers = members_[light];
        const std::vector<double> nothing(num_units_, 0.0);
        const double most = pressure(heavy), enough = most - (most - pressure(light)) / 4;
        Exchange best{most, 0, 0};
        for (std::size_t give = 0; give < givers.size(); ++give) {
            for (std::size_t take = 0; take < takers.size() + (givers.size() > 1); ++take) {
                --num_steps;
                const double* taken = take < takers.size() ? own(takers[take]) : nothing.data();
                const double heavier = pressure_after(loads_[heavy], loads_[light], own(givers[give]), taken, best.heavier);
                if (heavier < best.heavier) best = {heavier, give, take};
                if (best.heavier <= enough) return best;
            }
        }
        return best;
    }

    // The larger pressure after an exchange, or something that is not below `limit` where that is not either.
    double pressure_after(const std::vector<double>& heavy, const std::vector<double>& light, const double* given,
                          const double* taken, double limit) const {
        double heavier = 0.0;
        for (std::size_t unit = 0; unit < num_units_ && heavier < limit; ++unit) {
            const double moved = given[unit] - taken[unit];
            heavier = std::max({heavier, heavy[unit] - moved, light[unit] + moved});
        }
        return heavier;
    }

    void apply(const Exchange& exchange, std::int64_t heavy, std::int64_t light) {
        by_pressure_.erase({pressure(heavy), heavy});
        by_pressure_.erase({pressure(light), light});
        Samples &givers = members_[heavy], &takers = members_[light];
        const std::int64_t given = givers[exchange.give];
        givers.erase(givers.begin() + static_cast<std::ptrdiff_t>(exchange.give));
        if (exchange.take < takers.size()) {
            const std::int64_t taken = takers[exchange.take];
            takers.erase(takers.begin() + static_cast<std::ptrdiff_t>(exchange.take));
            insert(heavy, taken);
        }
        insert(light, given);
        list(heavy);
        list(light);
    }

    void insert(std::int64_t replica, std::int64_t sample) {
        Samples& members = members_[replica];
        members.insert(std::lower_bound(members.begin(), members.end(), sample), sample);
        replicas_[sample] = replica;
    }

    void list(std::int64_t replica) {
        std::vector<double>& loads = loads_[replica];
        std::fill(loads.begin(), loads.end(), 0.0);
        for (const std::int64_t sample : members_[replica])
            for (std::size_t unit = 0; unit < num_units_; ++unit) loads[unit] += own(sample)[unit];
        by_pressure_.emplace(pressure(replica), replica);
    }

    double pressure(std::int64_t replica) const { return *std::max_element(loads_[replica].begin(), loads_[replica].end()); }
    const double* own(std::int64_t sample) const { return own_.data() + static_cast<std::size_t>(sample) * num_units_; }

    const std::size_t num_units_;
    std::vector<double> own_;  // [sample][unit]
    Samples& replicas_;
    std::vector<Samples> members_;  // ascending
    std::vector<std::vector<double>> loads_;  // [replica][unit]
    std::set<std::pair<double, std::int64_t>> by_pressure_;
};

}  // namespace

void exchange_samples(const Pressures& pressures, std::int64_t num_replicas, Samples& replicas) {
    SampleExchange(pressures, num_replicas, replicas).run();
}

}  // namespace braid
