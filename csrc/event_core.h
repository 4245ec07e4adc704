// The one loop of the kernels that run work in lanes on a clock; what each of them adds is its rule of what starts when.
// Reference: multimodal/references/event_core.py

#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <queue>
#include <vector>

namespace braid {

template <typename Value>
using SmallestFirst = std::priority_queue<Value, std::vector<Value>, std::greater<Value>>;

// What happens when: at every moment all events of the same time, by number.
template <typename Time>
class EventClock {
   public:
    Time now() const { return now_; }
    void add(Time time, std::int64_t number) { events_.push({time, number}); }
    std::int64_t next() const { return events_.empty() ? -1 : events_.top().number; }  // The number of the next event; -1: none.

    // Goes on to the next moment and visits its events, those included that are added meanwhile; false if there are none.
    template <typename Visit>
    bool pass(const Visit& visit) {
        if (events_.empty()) return false;
        now_ = events_.top().time;
        while (!events_.empty() && events_.top().time == now_) {
            const std::int64_t number = events_.top().number;
            events_.pop();
            visit(number);
        }
        return true;
    }

   private:
    struct Event {
        Time time;
        std::int64_t number;
        bool operator>(const Event& other) const { return time != other.time ? time > other.time : number > other.number; }
    };

    Time now_ = 0;
    SmallestFirst<Event> events_;
};

// Lets a rule `start` work at every moment, until it says that it is done, and `end` what ends at the next one. Where nothing
// runs, the rule may `force` something to start, or be done.
template <typename Time, typename Rule>
void run_events(EventClock<Time>& clock, Rule& rule) {
    while (rule.start() && (clock.pass([&](std::int64_t number) { rule.end(number); }) || rule.force())) {
    }
}

// Rows of variable length in one array.
template <typename Value>
struct Rows {
    std::vector<std::int64_t> starts;
    std::vector<Value> values;

    struct Row {
        const Value *first, *last;
        const Value* begin() const { return first; }
        const Value* end() const { return last; }
        std::int64_t size() const { return last - first; }
    };
    Row operator[](std::int64_t row) const { return {values.data() + starts[row], values.data() + starts[row + 1]}; }
};

// Groups (row, value) pairs by row, in the order in which `each_pair` gives them to what it is called with, twice.
template <typename Value, typename EachPair>
Rows<Value> group_pairs(std::int64_t num_rows, const EachPair& each_pair) {
    Rows<Value> rows;
    rows.starts.assign(num_rows + 1, 0);
    each_pair([&](std::int64_t row, const Value&) { ++rows.starts[row + 1]; });
    std::partial_sum(rows.starts.begin(), rows.starts.end(), rows.starts.begin());
    rows.values.resize(rows.starts.back());
    std::vector<std::int64_t> next(rows.starts.begin(), rows.starts.end() - 1);
    each_pair([&](std::int64_t row, const Value& value) { rows.values[next[row]++] = value; });
    return rows;
}

}  // namespace braid
