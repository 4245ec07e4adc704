#include "lower_lanes.h"

#include <algorithm>
#include <unordered_map>

namespace braid {
namespace {

using Number = std::int64_t;

struct Rows {
    std::vector<Number> starts, values;
};

// Per action the messages at that end, in ascending order.
Rows messages_of(const View<Number>& ends, Number num_actions) {
    Rows rows;
    rows.starts.assign(num_actions + 1, 0);
    rows.values.resize(ends.size);
    for (Number message = 0; message < ends.size; ++message) ++rows.starts[ends[message] + 1];
    for (Number action = 0; action < num_actions; ++action) rows.starts[action + 1] += rows.starts[action];
    std::vector<Number> next(rows.starts.begin(), rows.starts.end() - 1);
    for (Number message = 0; message < ends.size; ++message) rows.values[next[ends[message]]++] = message;
    return rows;
}

// The receives that a lane has yet to post, as one queue per lane they come from.
class PendingReceives {
   public:
    explicit PendingReceives(const LanesToLower& lanes) : in_(lanes), is_posted_(lanes.producers.size, 0) {}

    void add(Number message) {
        is_posted_[message] = 0;
        for (Number at = in_.source_starts[message]; at < in_.source_starts[message + 1]; ++at)
            queues_[in_.source_lanes[at]].messages.push_back(message);
    }

    void sort() {
        for (auto& [lane, queue] : queues_) std::sort(queue.messages.begin(), queue.messages.end());
    }

    void clear() { queues_.clear(); }

    // Posts needed messages and, transitively, all that must be posted before; returns them in sending order.
    const std::vector<Number>& take(const Number* first, const Number* last) {
        taken_.clear();
        wanted_.clear();
        for (; first != last; ++first)
            if (!is_posted_[*first]) wanted_.push_back(*first);
        while (!wanted_.empty()) {
            const Number latest = wanted_.back();
            wanted_.pop_back();
            for (Number at = in_.source_starts[latest]; at < in_.source_starts[latest + 1]; ++at) {
                Queue& queue = queues_[in_.source_lanes[at]];
                while (queue.next < queue.messages.size() && queue.messages[queue.next] <= latest) {
                    const Number found = queue.messages[queue.next++];
                    if (is_posted_[found]) continue;
                    is_posted_[found] = 1;
                    taken_.push_back(found);
                    wanted_.push_back(found);
                }
            }
        }
        std::sort(taken_.begin(), taken_.end());
        return taken_;
    }

   private:
    struct Queue {
        std::vector<Number> messages;
        std::size_t next = 0;
    };

    const LanesToLower& in_;
    std::vector<std::uint8_t> is_posted_;
    std::unordered_map<Number, Queue> queues_;
    std::vector<Number> taken_, wanted_;
};

}  // namespace

std::vector<std::vector<std::int64_t>> lower_lanes(const LanesToLower& lanes) {
    const Rows sends = messages_of(lanes.producers, lanes.num_actions), receives = messages_of(lanes.consumers, lanes.num_actions);
    PendingReceives pending(lanes);
    std::vector<std::vector<Number>> lowered(lanes.lane_starts.size - 1);
    for (std::size_t lane = 0; lane < lowered.size(); ++lane) {
        const Number* first = lanes.lane_actions.data + lanes.lane_starts[lane];
        const Number* last = lanes.lane_actions.data + lanes.lane_starts[lane + 1];
        pending.clear();
        for (const Number* action = first; action != last; ++action)
            for (Number at = receives.starts[*action]; at < receives.starts[*action + 1]; ++at) pending.add(receives.values[at]);
        pending.sort();
        for (const Number* action = first; action != last; ++action) {
            const Number* needed = receives.values.data();
            const auto& taken = pending.take(needed + receives.starts[*action], needed + receives.starts[*action + 1]);
            for (const Number message : taken) lowered[lane].push_back(3 * message + 2);
            lowered[lane].push_back(3 * *action);
            for (Number at = sends.starts[*action]; at < sends.starts[*action + 1]; ++at)
                lowered[lane].push_back(3 * sends.values[at] + 1);
        }
    }
    return lowered;
}

}  // namespace braid
