#include "pipeline_recursion.h"

#include <algorithm>

namespace braid {

namespace {

std::int64_t end_index(const PipelineShape& shape, bool is_forward, std::int64_t virtual_stage, std::int64_t position) {
    return 1 + (position * shape.num_virtual_stages + virtual_stage) * 2 + is_forward;
}

}  // namespace

std::vector<PipelineStep> decode_steps(const PipelineShape& shape) {
    std::vector<PipelineStep> steps;
    steps.reserve(shape.num_steps);
    for (std::int64_t number = 0; number < shape.num_steps; ++number) {
        const bool is_forward = shape.codes[number] % 2;
        const std::int64_t virtual_stage = shape.codes[number] / 2 % shape.num_virtual_stages;
        const std::int64_t position = shape.codes[number] / 2 / shape.num_virtual_stages;
        const std::int64_t needed = is_forward ? virtual_stage - 1 : virtual_stage + 1;
        const bool needs = needed >= 0 && needed < shape.num_virtual_stages;
        steps.push_back({virtual_stage % shape.num_stages, virtual_stage, position, is_forward,
                         end_index(shape, is_forward, virtual_stage, position),
                         needs ? end_index(shape, is_forward, needed, position) : 0});
    }
    return steps;
}

PipelineEnd::PipelineEnd(const PipelineShape& shape)
    : shape_(shape), steps_(decode_steps(shape)), ends_(shape.num_steps + 1, 0.0), free_at_(shape.num_stages, 0.0) {}

double PipelineEnd::operator()(const std::vector<std::int64_t>& order) {
    std::fill(free_at_.begin(), free_at_.end(), 0.0);
    for (const PipelineStep& step : steps_) {
        const double start = std::max(free_at_[step.stage], ends_[step.needed]);
        free_at_[step.stage] = ends_[step.end] = start + shape_.seconds(step.is_forward, step.virtual_stage, order[step.position]);
    }
    return *std::max_element(free_at_.begin(), free_at_.end());
}

PipelineRecursion::PipelineRecursion(const PipelineShape& shape)
    : shape_(shape),
      steps_(shape.num_stages),
      index_(shape.num_steps + 1, 0),
      ends_(shape.num_steps + 1, 0.0),
      next_(shape.num_stages, 0),
      free_at_(shape.num_stages, 0.0) {
    for (const PipelineStep& step : decode_steps(shape)) {
        index_[step.end] = static_cast<std::int64_t>(steps_[step.stage].size());
        steps_[step.stage].push_back(step);
    }
}

void PipelineRecursion::append(std::int64_t microbatch) {
    order_.push_back(microbatch);
    run(static_cast<std::int64_t>(order_.size()), static_cast<std::int64_t>(steps_[0].size()));
}

double PipelineRecursion::interval() {
    const auto position = static_cast<std::int64_t>(order_.size());
    const std::vector<std::int64_t> saved_next = next_;
    const std::vector<double> saved_free_at = free_at_;
    double total = 0.0;
    for (std::int64_t virtual_stage = 0; virtual_stage < shape_.num_virtual_stages; virtual_stage += shape_.num_stages) {
        const std::int64_t index = index_[end_index(shape_, true, virtual_stage, position)];
        run(shape_.num_microbatches, index);
        const double free_at = free_at_[0];
        std::int64_t after = index;
        while (steps_[0][after].is_forward) ++after;
        run(shape_.num_microbatches, after);
        total += (ends_[steps_[0][after].needed] - free_at) / static_cast<double>(after - index);
    }
    next_ = saved_next;
    free_at_ = saved_free_at;
    return total;
}

// In rounds over the stages, up and down, until no step can run.
void PipelineRecursion::run(std::int64_t num_known, std::int64_t first_stage_stops_at) {
    const auto run_stage = [&](std::int64_t stage) {
        const std::int64_t stop = stage == 0 ? first_stage_stops_at : static_cast<std::int64_t>(steps_[stage].size());
        bool has_run = false;
        while (next_[stage] < stop && run_next(stage, num_known)) has_run = true;
        return has_run;
    };
    bool has_run = true;
    while (has_run) {
        has_run = false;
        for (std::int64_t stage = 0; stage < shape_.num_stages; ++stage) has_run |= run_stage(stage);
        for (std::int64_t stage = shape_.num_stages - 2; stage >= 0; --stage) has_run |= run_stage(stage);
    }
}

bool PipelineRecursion::run_next(std::int64_t stage, std::int64_t num_known) {
    const PipelineStep& step = steps_[stage][next_[stage]];
    if (step.position >= num_known) return false;
    if (step.needed > 0) {
        const std::int64_t needed = step.is_forward ? step.virtual_stage - 1 : step.virtual_stage + 1;
        if (index_[step.needed] >= next_[needed % shape_.num_stages]) return false;
    }
    const bool is_known = step.position < static_cast<std::int64_t>(order_.size());
    const std::int64_t microbatch = is_known ? order_[step.position] : shape_.num_microbatches;
    const double start = std::max(free_at_[stage], ends_[step.needed]);
    free_at_[stage] = ends_[step.end] = start + shape_.seconds(step.is_forward, step.virtual_stage, microbatch);
    ++next_[stage];
    return true;
}

}  // namespace braid
