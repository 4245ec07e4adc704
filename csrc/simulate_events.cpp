#include "simulate_events.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "event_core.h"

namespace braid {
namespace {

constexpr std::uint8_t kCompute = 0, kSend = 1, kGate = 3;

// Per value the rows that hold it, in ascending order.
Rows<std::int32_t> invert(const View<std::int64_t>& starts, const View<std::int64_t>& values, std::int64_t num_values) {
    return group_pairs<std::int32_t>(num_values, [&](const auto& take) {
        for (std::int64_t row = 0; row + 1 < starts.size; ++row)
            for (std::int64_t index = starts[row]; index < starts[row + 1]; ++index)
                take(values[index], static_cast<std::int32_t>(row));
    });
}

struct Lane {
    std::int64_t position, end;
    std::int32_t running = -1;
    bool is_draining = false;
    std::vector<std::int32_t> pending;  // Fillers that the lane has come to and not run.
    std::size_t num_tried = 0;          // How many of them were passed over while the carrier waits.
    double send_free = 0.0, receive_free = 0.0, collective_free = 0.0;
};

// Needs of a node that have not ended, and lanes that have to come to it first (of a computation, to stand at it).
struct Missing {
    std::int32_t needs, lanes;
};

// What a run reads of a node that starts or ends, side by side in memory.
struct Node {
    double seconds;
    std::uint32_t first_lane, first_follower;
    std::uint8_t kind;
};

class Run {
   public:
    explicit Run(const EventArrays& arrays)
        : arrays_(arrays),
          num_nodes_(arrays.kinds.size),
          lanes_(arrays.lane_starts.size - 1),
          lanes_of_(invert(arrays.lane_starts, arrays.lane_nodes, num_nodes_)),
          followers_(invert(arrays.need_starts, arrays.needs, num_nodes_)),
          missing_(num_nodes_),
          nodes_(num_nodes_ + 1),
          link_free_(arrays.num_links, 0.0) {
        times_.start_seconds.assign(num_nodes_, std::numeric_limits<double>::quiet_NaN());
        for (std::int64_t node = 0; node < num_nodes_; ++node) {
            const std::int64_t first_lane = lanes_of_.starts[node];
            missing_[node] = {static_cast<std::int32_t>(arrays.need_starts[node + 1] - arrays.need_starts[node]),
                              std::max(1, static_cast<std::int32_t>(lanes_of_.starts[node + 1] - first_lane))};
            nodes_[node] = {arrays.seconds[node], static_cast<std::uint32_t>(first_lane),
                            static_cast<std::uint32_t>(followers_.starts[node]), arrays.kinds[node]};
        }
        nodes_[num_nodes_].first_lane = static_cast<std::uint32_t>(lanes_of_.starts[num_nodes_]);
        nodes_[num_nodes_].first_follower = static_cast<std::uint32_t>(followers_.starts[num_nodes_]);
        for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
            lanes_[lane].position = arrays.lane_starts[lane];
            lanes_[lane].end = arrays.lane_starts[lane + 1];
        }
    }

    EventTimes run() {
        for (std::size_t lane = 0; lane < lanes_.size(); ++lane) advance(static_cast<std::int32_t>(lane), 0.0);
        run_events(clock_, *this);
        for (std::size_t lane = 0; lane < lanes_.size(); ++lane)
            times_.positions.push_back(lanes_[lane].position - arrays_.lane_starts[lane]);
        times_.end_seconds.resize(num_nodes_);
        for (std::int64_t node = 0; node < num_nodes_; ++node)
            times_.end_seconds[node] = times_.start_seconds[node] + arrays_.seconds[node];
        return std::move(times_);
    }

    // Work starts when what it waits for ends. Events are ends of nodes, then, from `num_nodes` on, lanes that decide whether to fill.
    bool start() const { return true; }
    bool force() const { return false; }
    void end(std::int64_t event) {
        if (event < num_nodes_) {
            finish(static_cast<std::int32_t>(event), clock_.now());
        } else {
            fill(lanes_[event - num_nodes_], clock_.now());
        }
    }

   private:
    Rows<std::int32_t>::Row lanes_of(std::int64_t node) const {
        return {lanes_of_.values.data() + nodes_[node].first_lane, lanes_of_.values.data() + nodes_[node + 1].first_lane};
    }
    Rows<std::int32_t>::Row followers_of(std::int64_t node) const {
        return {followers_.values.data() + nodes_[node].first_follower, followers_.values.data() + nodes_[node + 1].first_follower};
    }
    std::int32_t entry(const Lane& lane) const { return static_cast<std::int32_t>(arrays_.lane_nodes[lane.position]); }

    void finish(std::int32_t node, double now) {
        // What comes next is fetched meanwhile: most of the time goes by waiting for memory.
        if (const std::int64_t next = clock_.next(); next >= 0 && next < num_nodes_)
            for (const std::int32_t follower : followers_of(next)) __builtin_prefetch(&missing_[follower]);
        for (const std::int32_t follower : followers_of(node))
            if (--missing_[follower].needs == 0) meet(follower, now);
        if (nodes_[node].kind != kCompute) return;
        for (const std::int32_t lane : lanes_of(node)) leave(lane, node, now);
    }

    void meet(std::int32_t node, double now) {
        start_if_ready(node, now);
        if (nodes_[node].kind != kGate) return;
        for (const std::int32_t lane : lanes_of(node))
            if (lanes_[lane].position < lanes_[lane].end && entry(lanes_[lane]) == node) advance(lane, now);
    }

    // Goes on in a lane whose computation has ended.
    void leave(std::int32_t index, std::int32_t node, double now) {
        Lane& lane = lanes_[index];
        lane.running = -1;
        if (lane.is_draining) {
            lane.pending.erase(lane.pending.begin());
        } else if (lane.position < lane.end && entry(lane) == node) {
            ++lane.position;
            lane.is_draining = !lane.pending.empty();
            lane.num_tried = 0;
        } else {
            lane.pending.erase(std::find(lane.pending.begin(), lane.pending.end(), node));
        }
        advance(index, now);
    }

    void stand(std::int32_t node, double now) {
        --missing_[node].lanes;
        start_if_ready(node, now);
    }

    // Brings a free lane to its next computation.
    void advance(std::int32_t index, double now) {
        Lane& lane = lanes_[index];
        while (true) {
            while (!lane.is_draining && lane.position < lane.end) {
                const std::int32_t node = entry(lane);
                if (arrays_.lane_fillers[lane.position]) {
                    lane.pending.push_back(node);
                    ++lane.position;
                } else if (nodes_[node].kind == kGate && missing_[node].needs > 0) {
                    return;
                } else if (nodes_[node].kind != kCompute) {
                    ++lane.position;
                    stand(node, now);
                } else {
                    stand(node, now);
                    if (lane.running < 0 && lane.num_tried < lane.pending.size()) clock_.add(now, num_nodes_ + index);
                    return;
                }
            }
            if (!lane.pending.empty()) {
                lane.is_draining = true;
                stand(lane.pending.front(), now);
                return;
            }
            if (!lane.is_draining) return;
            lane.is_draining = false;
        }
    }

    // Runs the next filler in a lane whose carrier still waits.
    void fill(Lane& lane, double now) {
        if (lane.running >= 0 || lane.is_draining || lane.position == lane.end) return;
        for (; lane.num_tried < lane.pending.size(); ++lane.num_tried) {
            const std::int32_t filler = lane.pending[lane.num_tried];
            if (missing_[filler].needs == 0 && lanes_of(filler).size() == 1) {
                ++missing_[entry(lane)].lanes;
                compute(filler, now);
                return;
            }
        }
    }

    void start_if_ready(std::int32_t node, double now) {
        if (missing_[node].needs != 0 || missing_[node].lanes > 0) return;
        const std::uint8_t kind = nodes_[node].kind;
        if (kind == kCompute) {
            compute(node, now);
        } else if (kind == kSend) {
            send(node, now);
        } else if (kind == kGate) {
            occupy(node, now);
        } else {
            collect(node, now);
        }
    }

    void compute(std::int32_t node, double now) {
        for (const std::int32_t lane : lanes_of(node)) lanes_[lane].running = node;
        occupy(node, now);
    }

    void send(std::int32_t node, double now) {
        const std::int64_t first = arrays_.receiver_starts[node], last = arrays_.receiver_starts[node + 1];
        const std::int64_t link = arrays_.links[node];
        double start = now;
        for (const std::int32_t lane : lanes_of(node))
            start = std::max(start, lanes_[lane].send_free);
        for (std::int64_t index = first; index < last; ++index)
            start = std::max(start, lanes_[arrays_.receivers[index]].receive_free);
        if (link >= 0) start = std::max(start, link_free_[link]);
        const double end = start + nodes_[node].seconds;
        for (const std::int32_t lane : lanes_of(node)) lanes_[lane].send_free = end;
        for (std::int64_t index = first; index < last; ++index) lanes_[arrays_.receivers[index]].receive_free = end;
        if (link >= 0) link_free_[link] = end;
        occupy(node, start);
    }

    void collect(std::int32_t node, double now) {
        double start = now;
        for (const std::int32_t lane : lanes_of(node))
            start = std::max(start, lanes_[lane].collective_free);
        const double end = start + nodes_[node].seconds;
        for (const std::int32_t lane : lanes_of(node))
            lanes_[lane].collective_free = end;
        occupy(node, start);
    }

    void occupy(std::int32_t node, double start) {
        const double end = start + nodes_[node].seconds;
        __builtin_prefetch(followers_of(node).begin());
        times_.start_seconds[node] = start;
        clock_.add(end + arrays_.latency_seconds[node], node);
    }

    const EventArrays& arrays_;
    const std::int64_t num_nodes_;
    std::vector<Lane> lanes_;
    const Rows<std::int32_t> lanes_of_, followers_;
    std::vector<Missing> missing_;
    std::vector<Node> nodes_;  // One more than there are, with the ends of the last one's rows.
    std::vector<double> link_free_;
    EventClock<double> clock_;
    EventTimes times_;
};

}  // namespace

EventTimes simulate_events(const EventArrays& arrays) { return Run(arrays).run(); }

}  // namespace braid
