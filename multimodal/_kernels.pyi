from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def partition_longest_first(costs: Sequence[float], *, num_bins: int, max_items_per_bin: int) -> list[list[int]]: ...
def post_balance(
    lengths: NDArray[np.int64],
    additive: NDArray[np.int64] | None,
    padded: NDArray[np.int64] | None,
    *,
    num_bins: int,
    max_items_per_bin: int,
    refinement_steps: int,
) -> NDArray[np.int32]: ...
def group_rows(
    owners: NDArray[np.int64], values: NDArray[np.int64], num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def cut_evenly(
    amounts: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def map_stages(
    forward: NDArray[np.int64],
    backward: NDArray[np.int64],
    capacities: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    num_gpus: NDArray[np.int64],
    num_microbatches: NDArray[np.int64],
) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int64]]]: ...
def simulate_events(
    lane_starts: NDArray[np.int64],
    lane_nodes: NDArray[np.int64],
    lane_fillers: NDArray[np.uint8],
    kinds: NDArray[np.uint8],
    need_starts: NDArray[np.int64],
    needs: NDArray[np.int64],
    receiver_starts: NDArray[np.int64],
    receivers: NDArray[np.int64],
    seconds: NDArray[np.float64],
    latency_seconds: NDArray[np.float64],
    links: NDArray[np.int64],
    *,
    num_links: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]: ...
def fill_idle_lanes(
    *,
    durations: NDArray[np.int64],
    lane_starts: NDArray[np.int64],
    lanes: NDArray[np.int64],
    need_starts: NDArray[np.int64],
    needs: NDArray[np.int64],
    delays: NDArray[np.int64],
    line_starts: NDArray[np.int64],
    line: NDArray[np.int64],
    queue_starts: NDArray[np.int64],
    queues: NDArray[np.int64],
    holders: NDArray[np.int64],
    releases: NDArray[np.int64],
    limits: NDArray[np.int64],
    wait_starts: NDArray[np.int64],
    waits: NDArray[np.int64],
    goes_inside: NDArray[np.uint8],
    behind: NDArray[np.int64],
    tolerances: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]: ...
def link_actions(
    listed: NDArray[np.int64],
    need_starts: NDArray[np.int64],
    needs: NDArray[np.int64],
    flags: NDArray[np.uint8],
    microbatches: NDArray[np.int64],
    before: NDArray[np.int64],
    after: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]: ...
def list_schedule(
    *,
    lane_starts: NDArray[np.int64],
    lanes: NDArray[np.int64],
    costs: NDArray[np.int64],
    microbatches: NDArray[np.int64],
    groups: NDArray[np.int64],
    flags: NDArray[np.uint8],
    follower_starts: NDArray[np.int64],
    followers: NDArray[np.int64],
    release_starts: NDArray[np.int64],
    releases: NDArray[np.int64],
    phases: NDArray[np.int64],
    forward_limits: NDArray[np.int64],
    storage_limits: NDArray[np.int64],
    forward_floors: NDArray[np.int64],
    num_lanes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def find_mask_runs(bits: NDArray[np.int64], sample_ids: NDArray[np.int32], item_ids: NDArray[np.int32]) -> NDArray[np.int64]: ...
def list_mask_blocks(
    starts: NDArray[np.int64],
    bits: NDArray[np.int64],
    sample_ids: NDArray[np.int32],
    item_ids: NDArray[np.int32],
    window: int,
    query_block_size: int,
    key_block_size: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]: ...
def count_mask_blocks(
    starts: NDArray[np.int64],
    bits: NDArray[np.int64],
    sample_ids: NDArray[np.int32],
    item_ids: NDArray[np.int32],
    window: int,
    query_block_size: int,
    key_block_size: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def order_blocks(
    row_starts: NDArray[np.int64],
    blocks: NDArray[np.int32],
    is_full: NDArray[np.bool_],
    num_whole_rows: int,
    num_whole_columns: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def plan_work_list(
    row_starts: NDArray[np.int32], full_ends: NDArray[np.int32], limit: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]: ...
def assign_entrain(
    llm_loads: NDArray[np.float64],
    encoder_loads: NDArray[np.float64],
    *,
    num_replicas: int,
    num_microbatches: int,
    min_num_microbatches: int,
    max_subset_sums: int,
) -> tuple[list[int], list[int], list[int], list[int]]: ...
def reorder_microbatches(
    forward_seconds: NDArray[np.float64],
    backward_seconds: NDArray[np.float64],
    step_codes: NDArray[np.int64],
    *,
    num_stages: int,
    num_swaps: int,
) -> list[int]: ...
def rearrange_nodes(
    row_starts: NDArray[np.int64],
    batches: NDArray[np.int64],
    volumes: NDArray[np.int64],
    *,
    ranks_per_node: int,
    num_first_swaps: int,
    max_chain_length: int,
    max_evaluations: int,
) -> NDArray[np.int64]: ...
def distribute_longest_first(
    workloads: NDArray[np.int64], *, num_ranks: int, has_equal_counts: bool, max_exchanges: int
) -> NDArray[np.int32]: ...
