#include "list_schedule.h"

#include <algorithm>
#include <map>
#include <utility>

#include "event_core.h"

namespace braid {
namespace {

using Number = std::int64_t;

// Actions that wait to be let in: by urgency in their group, and by microbatch for when nothing else is left to do.
class Waiting {
   public:
    explicit Waiting(Number num_groups, Number num_actions) : of_group_(num_groups), is_in_(num_actions, 0) {}

    void insert(Number action, Number group, Number microbatch) {
        is_in_[action] = 1;
        of_group_[group].push(action);
        all_.push({microbatch, action});
    }

    void erase(Number action) { is_in_[action] = 0; }

    // The most urgent action of a group; -1: none.
    Number first_of(Number group) {
        SmallestFirst<Number>& heap = of_group_[group];
        while (!heap.empty() && !is_in_[heap.top()]) heap.pop();
        return heap.empty() ? -1 : heap.top();
    }

    // The action of the earliest microbatch; -1: none.
    Number earliest() {
        while (!all_.empty() && !is_in_[all_.top().second]) all_.pop();
        return all_.empty() ? -1 : all_.top().second;
    }

   private:
    std::vector<SmallestFirst<Number>> of_group_;
    SmallestFirst<std::pair<Number, Number>> all_;
    std::vector<std::uint8_t> is_in_;  // What was taken out stays in the heaps until it comes up.
};

class Scheduler {
   public:
    explicit Scheduler(const ListedActions& actions)
        : in_(actions),
          num_actions_(actions.costs.size),
          num_unmet_(num_actions_, 0),
          num_holds_(num_actions_, 0),
          ready_(actions.num_lanes),
          is_free_(actions.num_lanes, 1),
          is_touched_(actions.num_lanes, 0),
          order_(actions.num_lanes),
          in_flight_(actions.forward_limits.size, 0),
          stored_(actions.forward_limits.size, 0),
          begun_(actions.forward_limits.size, 0),
          to_begin_(actions.forward_limits.size, 0),
          parked_(actions.forward_limits.size, num_actions_),
          early_(actions.forward_limits.size, num_actions_) {
        for (Number index = 0; index < in_.followers.size; ++index) ++num_unmet_[in_.followers[index]];
        for (Number index = 0; index < in_.releases.size; ++index) ++num_holds_[in_.releases[index]];
        for (Number index = 0; index < num_actions_; ++index) to_begin_[in_.groups[index]] += gives_back(index);
        if (in_.phases.size > 0) hold_phases();
    }

    std::vector<std::vector<Number>> run() {
        for (Number index = 0; index < num_actions_; ++index)
            if (num_unmet_[index] == 0) initial_.push_back(index);
        for (const Number index : initial_) make_ready(index);
        run_events(clock_, *this);
        return std::move(order_);
    }

    bool start() {
        start_ready();
        return true;
    }

    // Lets the earliest backward or forward go on that a limit holds back.
    bool force() {
        const Number backward = early_.earliest(), forward = backward < 0 ? parked_.earliest() : -1;
        if (backward >= 0) let_back(backward);
        if (forward >= 0) admit(forward);
        return backward >= 0 || forward >= 0;
    }

    void end(Number index) {
        for_lanes(index, [&](Number lane) {
            is_free_[lane] = 1;
            touch(lane);
        });
        end_flights(index);
        for (Number at = in_.follower_starts[index]; at < in_.follower_starts[index + 1]; ++at) meet(in_.followers[at]);
        if (in_.phases.size > 0) end_phases(index);
    }

   private:
    bool has(Number index, std::uint8_t flag) const { return (in_.flags[index] & flag) != 0; }
    bool gives_back(Number index) const { return has(index, kIsForward) && has(index, kHasGradient); }

    template <typename Visit>
    void for_lanes(Number index, Visit visit) const {
        for (Number at = in_.lane_starts[index]; at < in_.lane_starts[index + 1]; ++at) visit(in_.lanes[at]);
    }

    // Makes every action wait, once per lane of its, for that lane's earlier phases.
    void hold_phases() {
        num_left_.resize(in_.num_lanes);
        held_.resize(in_.num_lanes);
        for (Number index = 0; index < num_actions_; ++index)
            for_lanes(index, [&](Number lane) { ++num_left_[lane][in_.phases[index]]; });
        for (Number index = 0; index < num_actions_; ++index)
            for_lanes(index, [&](Number lane) {
                if (in_.phases[index] <= num_left_[lane].begin()->first) return;
                held_[lane][in_.phases[index]].push_back(index);
                ++num_unmet_[index];
            });
    }

    void make_ready(Number index) {
        const Number group = in_.groups[index];
        if (has(index, kIsForward)) {
            if (is_full(group)) {
                parked_.insert(index, group, in_.microbatches[index]);
                return;
            }
            take_off(group);
        } else if (has(index, kIsGradient)) {
            if (is_too_early(group)) {
                early_.insert(index, group, in_.microbatches[index]);
                return;
            }
            --begun_[group];
        }
        enqueue(index);
    }

    // Too few microbatches are in flight for a backward, and there are forwards to wait for.
    bool is_too_early(Number group) const { return begun_[group] < in_.forward_floors[group] && to_begin_[group] > 0; }

    void let_back_on_time(Number group) {
        while (!is_too_early(group)) {
            const Number index = early_.first_of(group);
            if (index < 0) return;
            let_back(index);
        }
    }

    void let_back(Number index) {
        early_.erase(index);
        --begun_[in_.groups[index]];
        enqueue(index);
    }

    bool is_full(Number group) const {
        const Number limit = in_.forward_limits[group], storage = in_.storage_limits[group];
        return (limit >= 0 && in_flight_[group] >= limit) || (storage >= 0 && stored_[group] >= storage);
    }

    void take_off(Number group) {
        ++in_flight_[group];
        ++stored_[group];
    }

    void admit(Number index) {
        parked_.erase(index);
        take_off(in_.groups[index]);
        enqueue(index);
    }

    void touch(Number lane) {
        if (is_touched_[lane]) return;
        is_touched_[lane] = 1;
        touched_.push_back(lane);
    }

    void enqueue(Number index) {
        for_lanes(index, [&](Number lane) {
            ready_[lane].push(index);
            touch(lane);
        });
    }

    void start_ready() {
        std::vector<Number> lanes = touched_;
        std::sort(lanes.begin(), lanes.end());
        for (const Number lane : lanes) {
            if (!is_free_[lane] || ready_[lane].empty()) continue;
            const Number index = ready_[lane].top();
            bool is_first = true;
            for_lanes(index, [&](Number other) { is_first = is_first && is_free_[other] && ready_[other].top() == index; });
            if (is_first) begin(index);
        }
        for (const Number lane : touched_) is_touched_[lane] = 0;
        touched_.clear();
    }

    void begin(Number index) {
        for_lanes(index, [&](Number lane) {
            ready_[lane].pop();
            is_free_[lane] = 0;
            order_[lane].push_back(index);
        });
        if (gives_back(index)) {
            ++begun_[in_.groups[index]];
            --to_begin_[in_.groups[index]];
            let_back_on_time(in_.groups[index]);
        }
        clock_.add(clock_.now() + in_.costs[index], index);
    }

    // Takes note of what is no longer in flight or stored after an action, which may admit forwards.
    void end_flights(Number index) {
        landed_.clear();
        if (has(index, kIsForward) && num_holds_[index] == 0) landed_.push_back(index);
        for (Number at = in_.release_starts[index]; at < in_.release_starts[index + 1]; ++at)
            if (--num_holds_[in_.releases[at]] == 0) landed_.push_back(in_.releases[at]);
        freed_.clear();
        for (const Number forward : landed_) {
            const Number group = in_.groups[forward];
            --in_flight_[group];
            if (!has(forward, kHasWeightGradient)) --stored_[group];
            if (std::find(freed_.begin(), freed_.end(), group) == freed_.end()) freed_.push_back(group);
        }
        const Number own = in_.groups[index];
        if (has(index, kIsWeightGradient)) --stored_[own];
        if (std::find(freed_.begin(), freed_.end(), own) == freed_.end()) freed_.push_back(own);
        for (const Number group : freed_)
            for (Number forward = 0; !is_full(group) && (forward = parked_.first_of(group)) >= 0;) admit(forward);
    }

    void end_phases(Number index) {
        for_lanes(index, [&](Number lane) {
            std::map<Number, Number>& left = num_left_[lane];
            if (--left[in_.phases[index]] > 0) return;
            left.erase(in_.phases[index]);
            if (left.empty()) return;
            const auto found = held_[lane].find(left.begin()->first);
            if (found == held_[lane].end()) return;
            const std::vector<Number> held = std::move(found->second);
            held_[lane].erase(found);
            for (const Number each : held) meet(each);
        });
    }

    void meet(Number index) {
        if (--num_unmet_[index] == 0) make_ready(index);
    }

    const ListedActions& in_;
    const Number num_actions_;
    EventClock<Number> clock_;
    std::vector<Number> num_unmet_, num_holds_, initial_, touched_, landed_, freed_;
    std::vector<SmallestFirst<Number>> ready_;
    std::vector<std::uint8_t> is_free_, is_touched_;
    std::vector<std::vector<Number>> order_;
    std::vector<Number> in_flight_, stored_, begun_, to_begin_;
    Waiting parked_, early_;  // Forwards beyond their group's limits, and backwards below its floor.
    std::vector<std::map<Number, Number>> num_left_;
    std::vector<std::map<Number, std::vector<Number>>> held_;
};

}  // namespace

std::vector<std::vector<std::int64_t>> list_schedule(const ListedActions& actions) { return Scheduler(actions).run(); }

}  // namespace braid
