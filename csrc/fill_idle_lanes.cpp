#include "fill_idle_lanes.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "event_core.h"

namespace braid {
namespace {

using Numbers = std::vector<std::int64_t>;
enum State : char { kAsleep, kBlocked, kAwake };  // Of a lane.
using User = std::pair<std::int64_t, std::int64_t>;    // A piece, and the delay after which it can use what it needs.

class Filling {
   public:
    explicit Filling(const LanesToFill& lanes)
        : in_(lanes),
          num_pieces_(lanes.durations.size),
          num_lanes_(lanes.line_starts.size - 1),
          num_queues_(lanes.queue_starts.size - 1),
          is_filler_(num_pieces_, 0),
          num_missing_(num_pieces_, 0),
          arrived_at_(num_pieces_, 0),
          ended_at_(num_pieces_, -1),
          free_at_(num_lanes_, 0),
          expected_(num_pieces_, 0),
          looked_up_(num_pieces_, 0),
          num_kept_(lanes.limits.size, 0),
          queues_of_lane_(num_lanes_),
          carrier_of_lane_(num_lanes_, -1),
          left_(num_lanes_, 0),
          started_(num_lanes_, 0),
          states_(num_lanes_, kAsleep) {
        for (std::int64_t lane = 0; lane < num_lanes_; ++lane) line_heads_.push_back(in_.line_starts[lane]);
        for (std::int64_t queue = 0; queue < num_queues_; ++queue) queue_heads_.push_back(in_.queue_starts[queue]);
        for (std::int64_t at = 0; at < in_.queues.size; ++at) {
            const std::int64_t piece = in_.queues[at];
            is_filler_[piece] = 1;
            has_wide_fillers_ |= in_.lane_starts[piece + 1] - in_.lane_starts[piece] > 1;
        }
        for (std::int64_t queue = 0; queue < num_queues_; ++queue)
            if (queue_head(queue) >= 0)
                queues_of_lane_[in_.lanes[in_.lane_starts[queue_head(queue)]]].push_back(queue);
        for (std::int64_t piece = 0; piece < num_pieces_; ++piece) any_goes_inside_ |= in_.goes_inside[piece] > 0;
        result_.carriers.assign(num_pieces_, -1);
        result_.waits.assign(num_pieces_, -1);
        link();
        measure_tails();
        for (std::int64_t lane = 0; lane < num_lanes_; ++lane) wake(lane);
    }

    // Ends at once where it turns out not to be over before `most`.
    FilledLanes run(std::int64_t tolerance, std::int64_t most) {
        tolerance_ = tolerance;
        most_ = most;
        run_events(clock_, *this);
        return std::move(result_);
    }

    // Nothing differs with a larger tolerance unless something was too long.
    bool was_too_long() const { return was_too_long_; }

    bool start() {
        if (static_cast<std::int64_t>(result_.order.size()) == num_pieces_ || result_.end >= most_) return false;
        ++epoch_;
        begin_all();
        return true;
    }

    // The most urgent filler goes on although it does not fit, one whose holder is full only if there is no other.
    bool force() { return begin_filler(false, true) || begin_filler(false, false); }

    // Wakes the lanes of a piece that ends or can begin now, and of those that were only waiting for its end.
    void end(std::int64_t piece) {
        wake_lanes_of(piece);
        if (ended_at_[piece] != clock_.now()) return;
        for (const auto& [user, delay] : users_[piece])
            if (delay == 0 && num_missing_[user] == 0) wake_lanes_of(user);
    }

   private:
    void link() {
        before_ = group_pairs<std::int64_t>(num_pieces_, [&](const auto& take) {
            for (std::int64_t lane = 0; lane < num_lanes_; ++lane)
                for (std::int64_t at = in_.line_starts[lane] + 1; at < in_.line_starts[lane + 1]; ++at)
                    take(in_.line[at], in_.line[at - 1]);
        });
        users_ = group_pairs<User>(num_pieces_, [&](const auto& take) {
            for (std::int64_t piece = 0; piece < num_pieces_; ++piece)
                for (std::int64_t at = in_.need_starts[piece]; at < in_.need_starts[piece + 1]; ++at)
                    take(in_.needs[at], {piece, in_.delays[at]});
        });
        for (std::int64_t piece = 0; piece < num_pieces_; ++piece)
            num_missing_[piece] = in_.need_starts[piece + 1] - in_.need_starts[piece];
    }


    // The longest way from each piece's start to the end of all, over needs and the lanes' orders.
    void measure_tails() {
        Numbers num_users(num_pieces_, 0), ready;
        for (std::int64_t piece = 0; piece < num_pieces_; ++piece) {
            num_users[piece] += users_[piece].size();
            for (const std::int64_t earlier : before_[piece]) ++num_users[earlier];
        }
        for (std::int64_t piece = 0; piece < num_pieces_; ++piece)
            if (num_users[piece] == 0) ready.push_back(piece);
        tails_.assign(num_pieces_, 0);
        while (!ready.empty()) {
            const std::int64_t piece = ready.back();
            ready.pop_back();
            tails_[piece] += in_.durations[piece];
            const auto lengthen = [&](std::int64_t earlier, std::int64_t delay) {
                tails_[earlier] = std::max(tails_[earlier], delay + tails_[piece]);
                if (--num_users[earlier] == 0) ready.push_back(earlier);
            };
            for (std::int64_t at = in_.need_starts[piece]; at < in_.need_starts[piece + 1]; ++at)
                lengthen(in_.needs[at], in_.delays[at]);
            for (const std::int64_t earlier : before_[piece]) lengthen(earlier, 0);
        }
    }

    // The piece that a lane's order has come to; -1 at its end.
    std::int64_t line_head(std::int64_t lane) const {
        return line_heads_[lane] < in_.line_starts[lane + 1] ? in_.line[line_heads_[lane]] : -1;
    }

    std::int64_t queue_head(std::int64_t queue) const {
        return queue_heads_[queue] < in_.queue_starts[queue + 1] ? in_.queues[queue_heads_[queue]] : -1;
    }

    bool is_ready(std::int64_t piece) const {
        if (num_missing_[piece] > 0 || arrived_at_[piece] > clock_.now()) return false;
        for (std::int64_t at = in_.lane_starts[piece]; at < in_.lane_starts[piece + 1]; ++at)
            if (free_at_[in_.lanes[at]] > clock_.now()) return false;
        return true;
    }

    // All lanes of a piece that keeps its order have come to it.
    bool is_next(std::int64_t piece) const {
        for (std::int64_t at = in_.lane_starts[piece]; at < in_.lane_starts[piece + 1]; ++at)
            if (line_head(in_.lanes[at]) != piece) return false;
        return true;
    }

    // The piece with the longest tail goes first, then the lower number.
    bool goes_before(std::int64_t piece, std::int64_t other) const {
        if (other < 0) return true;
        return tails_[piece] != tails_[other] ? tails_[piece] > tails_[other] : piece < other;
    }

    bool has_room(std::int64_t piece) const {
        const std::int64_t holder = in_.holders[piece];
        return holder < 0 || num_kept_[holder] < in_.limits[holder];
    }

    // Begins all that can begin now: of fillers that fit and pieces that keep their order, always a filler if there is one.
    void begin_all() {
        while (begin_filler(true, true) || begin_line()) {
        }
        const auto is_busy = [&](std::int64_t lane) {
            if (states_[lane] == kBlocked && free_at_[lane] <= clock_.now()) return false;
            if (states_[lane] == kBlocked) states_[lane] = kAsleep;
            return true;
        };
        blocked_.erase(std::remove_if(blocked_.begin(), blocked_.end(), is_busy), blocked_.end());
        for (const std::int64_t lane : woken_) {
            states_[lane] = has_ready_filler(lane) ? kBlocked : kAsleep;
            if (states_[lane] == kBlocked) blocked_.push_back(lane);
        }
        woken_.clear();
        looks_at_all_ = has_wide_fillers_;
    }

    bool has_ready_filler(std::int64_t lane) const {
        if (free_at_[lane] > clock_.now()) return false;
        const auto is_there = [&](std::int64_t queue) {
            const std::int64_t piece = queue_head(queue);
            return piece >= 0 && num_missing_[piece] == 0 && arrived_at_[piece] <= clock_.now();
        };
        return std::any_of(queues_of_lane_[lane].begin(), queues_of_lane_[lane].end(), is_there);
    }

    // A lane is woken when it becomes free, and when the last need of a piece of its arrives.
    void wake(std::int64_t lane) {
        if (states_[lane] == kAwake) return;
        states_[lane] = kAwake;
        woken_.push_back(lane);
    }

    bool begin_filler(bool must_fit, bool needs_room) {
        std::int64_t chosen = -1;
        const auto look_at = [&](std::int64_t lane) {
            if (free_at_[lane] > clock_.now()) return;
            for (const std::int64_t queue : queues_of_lane_[lane]) {
                const std::int64_t piece = queue_head(queue);
                if (piece >= 0 && goes_before(piece, chosen) && is_ready(piece) && (!needs_room || has_room(piece)) &&
                    (!must_fit || fits(piece))) {
                    chosen = piece;
                    chosen_queue_ = queue;
                }
            }
        };
        for (const std::int64_t lane : woken_) look_at(lane);
        if (looks_at_all_ || !must_fit)
            for (const std::int64_t lane : blocked_)
                if (states_[lane] == kBlocked) look_at(lane);
        if (chosen < 0) return false;
        ++queue_heads_[chosen_queue_];
        begin(chosen);
        change_expectations();
        return true;
    }

    // A piece that keeps its order begins as soon as it can, so only lanes that were just woken have one that can. It begins when
    // it was expected to, so that nothing else fits then, unless fillers went into its waits.
    bool begin_line() {
        std::int64_t chosen = -1;
        for (const std::int64_t lane : woken_) {
            const std::int64_t piece = line_head(lane);
            if (piece >= 0 && goes_before(piece, chosen) && is_ready(piece) && is_next(piece)) chosen = piece;
        }
        if (chosen < 0) return false;
        for (std::int64_t at = in_.lane_starts[chosen]; at < in_.lane_starts[chosen + 1]; ++at) ++line_heads_[in_.lanes[at]];
        begin(chosen, fill_waits(chosen));
        if (!inside_.empty()) change_expectations();
        return true;
    }

    // What others are expected to wait for has changed: fillers that did not fit may fit now. As time alone goes by, they do not.
    void change_expectations() {
        ++epoch_;
        looks_at_all_ = true;
    }

    // Puts ready fillers into the waits of a piece that is about to begin, the most urgent first, as far as they are long; returns
    // by how much the piece gets longer. Their collectives start behind the wait, and make what is computed there longer only
    // where they take more time than that.
    std::int64_t fill_waits(std::int64_t carrier) {
        const std::int64_t first_wait = in_.wait_starts[carrier], num_waits = in_.wait_starts[carrier + 1] - first_wait;
        inside_.clear();
        if (num_waits == 0) return 0;
        std::int64_t interval = in_.durations[carrier], added = 0;
        for (std::int64_t wait = 0; wait < num_waits; ++wait) interval -= in_.waits[first_wait + wait];
        interval = std::max<std::int64_t>(0, interval) / (num_waits + 1);
        const std::int64_t first_lane = in_.lane_starts[carrier], last_lane = in_.lane_starts[carrier + 1];
        for (std::int64_t at = first_lane; at < last_lane; ++at) carrier_of_lane_[in_.lanes[at]] = carrier;
        for (std::int64_t wait = 0; wait < num_waits; ++wait) {
            for (std::int64_t at = first_lane; at < last_lane; ++at) {
                left_[in_.lanes[at]] = in_.waits[first_wait + wait];
                started_[in_.lanes[at]] = 0;
            }
            for (std::int64_t queue = next_inside(carrier, wait); queue >= 0; queue = next_inside(carrier, wait)) {
                const std::int64_t piece = queue_head(queue);
                ++queue_heads_[queue];
                for (std::int64_t at = in_.lane_starts[piece]; at < in_.lane_starts[piece + 1]; ++at) {
                    left_[in_.lanes[at]] -= in_.durations[piece] - in_.behind[piece];
                    started_[in_.lanes[at]] += in_.behind[piece];
                }
                result_.carriers[piece] = carrier;
                result_.waits[piece] = wait;
                keep_and_release(piece);
                inside_.push_back(piece);
            }
            std::int64_t excess = 0, late = 0;
            for (std::int64_t at = first_lane; at < last_lane; ++at) {
                excess = std::max(excess, -left_[in_.lanes[at]]);
                late = std::max(late, started_[in_.lanes[at]] - interval);
            }
            added += excess + late;
        }
        for (const std::int64_t piece : inside_) end_at(piece, clock_.now() + in_.durations[carrier] + added);
        return added;
    }

    // The queue whose head is the most urgent one that can run in the rest of a carrier's wait, in its lanes; -1: none.
    std::int64_t next_inside(std::int64_t carrier, std::int64_t wait) {
        std::int64_t chosen = -1, chosen_queue = -1;
        for (std::int64_t at = in_.lane_starts[carrier]; at < in_.lane_starts[carrier + 1]; ++at) {
            for (const std::int64_t queue : queues_of_lane_[in_.lanes[at]]) {
                const std::int64_t piece = queue_head(queue);
                if (piece < 0 || !in_.goes_inside[piece] || !goes_before(piece, chosen) || !has_room(piece)) continue;
                if (!is_short_enough(piece, carrier) || !can_go_inside(piece, carrier, wait)) continue;
                chosen = piece;
                chosen_queue = queue;
            }
        }
        return chosen_queue;
    }

    bool is_short_enough(std::int64_t piece, std::int64_t carrier) {
        const std::int64_t duration = in_.durations[piece] - in_.behind[piece];
        for (std::int64_t at = in_.lane_starts[piece]; at < in_.lane_starts[piece + 1]; ++at) {
            const std::int64_t lane = in_.lanes[at];
            if (carrier_of_lane_[lane] != carrier || left_[lane] <= 0 || is_too_long(duration, left_[lane])) return false;
        }
        return true;
    }

    // All that it needs is there, or runs before it inside the same piece in the same lanes, in an earlier wait if a collective
    // lies between.
    bool can_go_inside(std::int64_t piece, std::int64_t carrier, std::int64_t wait) const {
        for (std::int64_t at = in_.need_starts[piece]; at < in_.need_starts[piece + 1]; ++at) {
            const std::int64_t need = in_.needs[at];
            const bool is_before = result_.carriers[need] == carrier && has_lanes_of(need, piece) &&
                                   (in_.goes_inside[need] < 2 || result_.waits[need] < wait);
            if (!is_before && (ended_at_[need] < 0 || ended_at_[need] + in_.delays[at] > clock_.now())) return false;
        }
        return true;
    }

    bool has_lanes_of(std::int64_t piece, std::int64_t other) const {
        const auto* lanes = &in_.lanes[0];
        return std::equal(lanes + in_.lane_starts[piece], lanes + in_.lane_starts[piece + 1], lanes + in_.lane_starts[other],
                          lanes + in_.lane_starts[other + 1]);
    }

    bool fits(std::int64_t piece) {
        for (std::int64_t at = in_.lane_starts[piece]; at < in_.lane_starts[piece + 1]; ++at) {
            const std::int64_t next = line_head(in_.lanes[at]);
            if (next < 0 || tails_[piece] > tails_[next]) continue;
            const std::int64_t idle = expected_start(next) - clock_.now();
            if (idle <= 0 || is_too_long(in_.durations[piece], idle)) return false;
        }
        return true;
    }

    bool is_too_long(std::int64_t duration, std::int64_t idle) {
        const bool is = (100 - tolerance_) * duration > 100 * idle;
        was_too_long_ |= is;
        return is;
    }

    // When a piece that keeps its order could start if no filler were begun any more.
    std::int64_t expected_start(std::int64_t piece) {
        stack_.push_back(piece);
        while (!stack_.empty()) {
            const std::int64_t top = stack_.back();
            const std::size_t height = stack_.size();
            std::int64_t start = clock_.now();
            for (std::int64_t at = in_.lane_starts[top]; at < in_.lane_starts[top + 1]; ++at)
                start = std::max(start, free_at_[in_.lanes[at]]);
            const auto follow = [&](std::int64_t earlier, std::int64_t delay) {
                if (ended_at_[earlier] >= 0) {
                    start = std::max(start, ended_at_[earlier] + delay);
                } else if (is_filler_[earlier]) {
                    return;
                } else if (looked_up_[earlier] == epoch_) {
                    start = std::max(start, expected_[earlier] + in_.durations[earlier] + delay);
                } else {
                    stack_.push_back(earlier);
                }
            };
            for (std::int64_t at = in_.need_starts[top]; at < in_.need_starts[top + 1]; ++at) follow(in_.needs[at], in_.delays[at]);
            for (const std::int64_t earlier : before_[top]) follow(earlier, 0);
            if (stack_.size() > height) continue;
            expected_[top] = start;
            looked_up_[top] = epoch_;
            stack_.pop_back();
        }
        return expected_[piece];
    }

    void begin(std::int64_t piece, std::int64_t added = 0) {
        const std::int64_t end = clock_.now() + in_.durations[piece] + added;
        for (std::int64_t at = in_.lane_starts[piece]; at < in_.lane_starts[piece + 1]; ++at) free_at_[in_.lanes[at]] = end;
        keep_and_release(piece);
        end_at(piece, end);
        // What comes behind it takes as long as its tail, unless it runs inside other pieces.
        if (!any_goes_inside_) result_.end = std::max(result_.end, clock_.now() + tails_[piece]);
    }

    void keep_and_release(std::int64_t piece) {
        if (in_.holders[piece] >= 0) ++num_kept_[in_.holders[piece]];
        if (in_.releases[piece] >= 0) --num_kept_[in_.releases[piece]];
    }

    void end_at(std::int64_t piece, std::int64_t end) {
        ended_at_[piece] = end;
        result_.order.push_back(piece);
        result_.end = std::max(result_.end, end);
        if (end > clock_.now()) clock_.add(end, piece);
        for (const auto& [user, delay] : users_[piece]) {
            --num_missing_[user];
            arrived_at_[user] = std::max(arrived_at_[user], end + delay);
            if (delay > 0) clock_.add(end + delay, user);
        }
        if (end <= clock_.now()) this->end(piece);
    }

    void wake_lanes_of(std::int64_t piece) {
        for (std::int64_t at = in_.lane_starts[piece]; at < in_.lane_starts[piece + 1]; ++at) wake(in_.lanes[at]);
    }

    const LanesToFill& in_;
    const std::int64_t num_pieces_, num_lanes_, num_queues_;
    std::vector<char> is_filler_;
    Rows<std::int64_t> before_;  // Per piece those right before it in its lanes' orders.
    Rows<User> users_;
    Numbers tails_, num_missing_, arrived_at_;
    Numbers ended_at_;  // Per piece that has started; -1: it has not.
    Numbers free_at_, line_heads_, queue_heads_;
    Numbers expected_, looked_up_, stack_;
    Numbers num_kept_;  // Per holder.
    Numbers inside_;  // Of the carrier that is being filled.
    std::vector<Numbers> queues_of_lane_;  // By the first lane of their pieces.
    Numbers carrier_of_lane_;  // The last one that was filled.
    Numbers left_, started_;  // Per lane: of the wait that is being filled, and of collectives that start behind it.
    std::int64_t epoch_ = 0, chosen_queue_ = 0, tolerance_ = 0, most_ = 0;
    bool any_goes_inside_ = false, has_wide_fillers_ = false, looks_at_all_ = true, was_too_long_ = false;
    // Lanes that were woken at this moment, and those where only fillers are ready, none of which fit when it was last looked at.
    Numbers woken_, blocked_;
    std::vector<State> states_;
    // When pieces end, and when what they need arrives.
    EventClock<std::int64_t> clock_;
    FilledLanes result_;
};

}  // namespace

FilledLanes fill_idle_lanes(const LanesToFill& lanes) {
    const Filling to_fill(lanes);
    FilledLanes best;
    best.end = std::numeric_limits<std::int64_t>::max();
    for (std::int64_t index = 0; index < lanes.tolerances.size; ++index) {
        Filling filling(to_fill);
        FilledLanes found = filling.run(lanes.tolerances[index], best.end);
        if (found.end < best.end) best = std::move(found);
        if (!filling.was_too_long()) break;
    }
    return best;
}

}  // namespace braid
