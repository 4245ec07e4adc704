// The ends of the steps of one pipeline. Reference: benchmarks/reordering_steps.py

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

// What the microbatches of a pipeline take, and in which order the stages run their steps.
struct PipelineShape {
    std::int64_t num_stages;
    std::int64_t num_virtual_stages;
    std::int64_t num_microbatches;
    // [num_virtual_stages][num_microbatches + 1]; last, what a microbatch takes that is not known yet.
    const double* forward;
    const double* backward;
    // All steps, each after the one that it needs: (position * num_virtual_stages + virtual stage) * 2 + is forward.
    const std::int64_t* codes;
    std::int64_t num_steps;

    double seconds(bool is_forward, std::int64_t virtual_stage, std::int64_t microbatch) const {
        return (is_forward ? forward : backward)[virtual_stage * (num_microbatches + 1) + microbatch];
    }
};

// Steps and the place of their end in a table whose entry 0 stands for "needs nothing".
struct PipelineStep {
    std::int64_t stage;
    std::int64_t virtual_stage;
    std::int64_t position;
    bool is_forward;
    std::int64_t end;
    std::int64_t needed;
};

std::vector<PipelineStep> decode_steps(const PipelineShape& shape);

// When the last step ends if the microbatches run in this order. O(steps).
class PipelineEnd {
public:
    explicit PipelineEnd(const PipelineShape& shape);
    double operator()(const std::vector<std::int64_t>& order);

private:
    const PipelineShape& shape_;
    std::vector<PipelineStep> steps_;
    std::vector<double> ends_;
    std::vector<double> free_at_;
};

// The end of every step as far as the order is known.
class PipelineRecursion {
public:
    explicit PipelineRecursion(const PipelineShape& shape);

    // Appends a microbatch to the order and runs every step that this makes possible.
    void append(std::int64_t microbatch);
    // How much of stage 0's time waits to be filled by the forwards of the next microbatch in the order.
    double interval();

private:
    void run(std::int64_t num_known, std::int64_t first_stage_stops_at);
    bool run_next(std::int64_t stage, std::int64_t num_known);

    const PipelineShape& shape_;
    std::vector<std::vector<PipelineStep>> steps_;
    // Per end: the index of its step on its stage.
    std::vector<std::int64_t> index_;
    std::vector<double> ends_;
    std::vector<std::int64_t> order_;
    std::vector<std::int64_t> next_;
    std::vector<double> free_at_;
};

}  // namespace braid
