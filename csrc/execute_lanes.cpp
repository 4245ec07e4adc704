#include "execute_lanes.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace braid {
namespace {

constexpr std::uint8_t kSend = 1, kReceive = 2;

class Execution {
   public:
    explicit Execution(const NumberedLanes& lanes)
        : in_(lanes),
          num_lanes_(lanes.lane_starts.size - 1),
          num_actions_(lanes.resources.size),
          positions_(num_lanes_),
          free_at_(num_lanes_, 0.0),
          done_at_(num_actions_, 0.0),
          num_passed_(num_actions_, 0),
          passed_at_(num_actions_, 0.0),
          first_waiter_(num_actions_, -1),
          num_lanes_of_collective_(lanes.member_starts.size - 1, 0),
          num_arrived_(lanes.member_starts.size - 1, 0),
          num_met_(lanes.member_starts.size - 1, 0),
          arrived_at_(num_lanes_, -1),
          mark_(num_lanes_, -1) {
        events_.is_done.assign(num_actions_, 0);
        for (auto* column : {&events_.actions, &events_.lanes}) column->reserve(lanes.lane_actions.size);
        for (auto* column : {&events_.start_seconds, &events_.end_seconds}) column->reserve(lanes.lane_actions.size);
        for (std::int64_t lane = 0; lane < num_lanes_; ++lane) positions_[lane] = lanes.lane_starts[lane];
        for (std::size_t collective = 0; collective < num_arrived_.size(); ++collective)
            for (std::int64_t index = in_.member_starts[collective]; index < in_.member_starts[collective + 1]; ++index)
                num_lanes_of_collective_[collective] += num_lanes_of(in_.members[index]);
    }

    LaneEvents run() {
        for (std::int64_t lane = 0; lane < num_lanes_; ++lane) queue_.push_back(lane);
        while (!queue_.empty()) {
            const std::int64_t lane = current_ = queue_.front();
            queue_.pop_front();
            while (head(lane) >= 0 && advance(lane)) {
            }
        }
        for (std::int64_t lane = 0; lane < num_lanes_; ++lane)
            events_.positions.push_back(positions_[lane] - in_.lane_starts[lane]);
        return std::move(events_);
    }

   private:
    // The action that a lane has come to; -1 at its end.
    std::int64_t head(std::int64_t lane) const {
        return positions_[lane] < in_.lane_starts[lane + 1] ? in_.lane_actions[positions_[lane]] : -1;
    }

    bool advance(std::int64_t lane) {
        const std::int64_t action = head(lane);
        if (in_.resources[action] == kSend) return send(action, lane);
        if (in_.resources[action] == kReceive) return post(action, lane);
        return in_.collectives[action] < 0 ? compute(action, lane) : collect(action, lane);
    }

    bool send(std::int64_t action, std::int64_t lane) {
        own_lane_.assign(1, lane);
        if (!is_met(action, own_lane_)) return false;
        pass(action, lane);
        return true;
    }

    bool post(std::int64_t action, std::int64_t lane) {
        const std::int64_t sent = in_.needs[in_.need_starts[action]];
        pass(action, lane);
        if (!events_.is_done[sent]) wait(sent, lane);
        return true;
    }

    std::int64_t num_lanes_of(std::int64_t action) const {
        return in_.stage_starts[in_.stages[action] + 1] - in_.stage_starts[in_.stages[action]];
    }

    // Goes past a message; it is complete when all lanes of its stage have passed it.
    void pass(std::int64_t action, std::int64_t lane) {
        ++positions_[lane];
        passed_at_[action] = std::max(passed_at_[action], free_at_[lane]);
        if (++num_passed_[action] == num_lanes_of(action) && in_.resources[action] == kSend)
            complete(action, passed_at_[action]);
    }

    // What has to be complete for a need: of a receive, its send.
    std::int64_t awaited_by(std::int64_t need) const {
        return in_.resources[need] == kReceive ? in_.needs[in_.need_starts[need]] : need;
    }

    // When a need was met: a receive when it is posted in all lanes of its stage, and sent.
    bool has_ended(std::int64_t need, double& time) const {
        if (in_.resources[need] == kReceive && num_passed_[need] < num_lanes_of(need)) return false;
        const std::int64_t awaited = awaited_by(need);
        time = done_at_[awaited];
        return events_.is_done[awaited] != 0;
    }

    bool is_met(std::int64_t action, const std::vector<std::int64_t>& lanes) {
        for (std::int64_t index = in_.need_starts[action]; index < in_.need_starts[action + 1]; ++index) {
            const std::int64_t need = in_.needs[index];
            double time;
            if (has_ended(need, time)) continue;
            for (const std::int64_t lane : lanes) wait(awaited_by(need), lane);
            return false;
        }
        return true;
    }

    // Adds the lanes of an action's stage to `lanes_`, each once a round.
    void add_lanes(std::int64_t action) {
        const std::int64_t stage = in_.stages[action];
        for (std::int64_t index = in_.stage_starts[stage]; index < in_.stage_starts[stage + 1]; ++index) {
            const std::int64_t lane = in_.stage_lanes[index];
            if (mark_[lane] == round_) continue;
            mark_[lane] = round_;
            lanes_.push_back(lane);
        }
    }

    void begin_round() {
        together_.clear();
        lanes_.clear();
        ++round_;
    }

    bool compute(std::int64_t action, std::int64_t lane) {
        if (num_lanes_of(action) == 1) return compute_alone(action, lane);
        begin_round();
        together_.push_back(action);
        add_lanes(action);
        for (const std::int64_t lane : lanes_)
            if (head(lane) != action) return false;
        if (!is_met(action, lanes_)) return false;
        start_together();
        return true;
    }

    bool compute_alone(std::int64_t action, std::int64_t lane) {
        double start = free_at_[lane];
        for (std::int64_t index = in_.need_starts[action]; index < in_.need_starts[action + 1]; ++index) {
            double time;
            if (!has_ended(in_.needs[index], time)) {
                wait(awaited_by(in_.needs[index]), lane);
                return false;
            }
            start = std::max(start, time);
        }
        occupy(action, start);
        return true;
    }

    // A collective looks at its members when the last of their lanes has come to it, and goes on where it stopped when it is
    // woken: every lane and every need is looked at once, however many replicas there are.
    bool collect(std::int64_t action, std::int64_t lane) {
        const std::int64_t collective = in_.collectives[action];
        const std::int64_t first = in_.member_starts[collective], last = in_.member_starts[collective + 1];
        if (arrived_at_[lane] != positions_[lane]) {
            arrived_at_[lane] = positions_[lane];
            ++num_arrived_[collective];
        }
        if (num_arrived_[collective] < num_lanes_of_collective_[collective]) return false;
        own_lane_.assign(1, lane);
        for (std::int64_t index = first + num_met_[collective]; index < last; ++index) {
            if (!is_met(in_.members[index], own_lane_)) return false;
            ++num_met_[collective];
        }
        begin_round();
        for (std::int64_t index = first; index < last; ++index) {
            together_.push_back(in_.members[index]);
            add_lanes(in_.members[index]);
        }
        start_together();
        return true;
    }

    void start_together() {
        double start = 0.0;
        for (const std::int64_t each : together_)
            for (std::int64_t index = in_.need_starts[each]; index < in_.need_starts[each + 1]; ++index) {
                double time = 0.0;
                has_ended(in_.needs[index], time);
                start = std::max(start, time);
            }
        for (const std::int64_t lane : lanes_) start = std::max(start, free_at_[lane]);
        for (const std::int64_t each : together_) occupy(each, start);
        for (const std::int64_t lane : lanes_)
            if (lane != current_) queue_.push_back(lane);
    }

    void occupy(std::int64_t action, double start) {
        const double end = start + in_.durations[action];
        const std::int64_t stage = in_.stages[action];
        for (std::int64_t index = in_.stage_starts[stage]; index < in_.stage_starts[stage + 1]; ++index) {
            const std::int64_t lane = in_.stage_lanes[index];
            if (end > start) {
                events_.actions.push_back(action);
                events_.lanes.push_back(lane);
                events_.start_seconds.push_back(start);
                events_.end_seconds.push_back(end);
            }
            ++positions_[lane];
            free_at_[lane] = end;
        }
        complete(action, end);
    }

    void complete(std::int64_t action, double time) {
        done_at_[action] = time;
        events_.is_done[action] = 1;
        if (first_waiter_[action] < 0) return;
        woken_.clear();
        for (std::int64_t at = first_waiter_[action]; at >= 0; at = waiters_[at].next) woken_.push_back(waiters_[at].lane);
        first_waiter_[action] = -1;
        std::sort(woken_.begin(), woken_.end());
        queue_.insert(queue_.end(), woken_.begin(), std::unique(woken_.begin(), woken_.end()));
    }

    // Notes that a lane goes on when an action is complete.
    void wait(std::int64_t action, std::int64_t lane) {
        waiters_.push_back({lane, first_waiter_[action]});
        first_waiter_[action] = static_cast<std::int64_t>(waiters_.size()) - 1;
    }

    struct Waiter {
        std::int64_t lane, next;
    };

    const NumberedLanes& in_;
    const std::int64_t num_lanes_, num_actions_;
    std::vector<std::int64_t> positions_;
    std::vector<double> free_at_, done_at_;
    std::vector<std::int64_t> num_passed_;
    std::vector<double> passed_at_;
    std::vector<std::int64_t> first_waiter_, woken_;
    std::vector<Waiter> waiters_;  // Lists, one per action that is awaited.
    std::vector<std::int64_t> num_lanes_of_collective_;
    std::vector<std::int64_t> num_arrived_, num_met_;  // Per collective: lanes that stand at it, members whose needs are met.
    std::vector<std::int64_t> arrived_at_;             // Per lane the position at which it was last counted.
    std::vector<std::int64_t> mark_;
    std::int64_t round_ = 0;
    std::int64_t current_ = -1;  // The lane that goes on, and need not be told that it may.
    std::vector<std::int64_t> own_lane_, together_, lanes_;
    std::deque<std::int64_t> queue_;
    LaneEvents events_;
};

}  // namespace

LaneEvents execute_lanes(const NumberedLanes& lanes) { return Execution(lanes).run(); }

}  // namespace braid
