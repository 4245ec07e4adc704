"""Pairs rows with columns so that the largest bottleneck is minimal and, among such pairings, the sum of costs is."""

from collections.abc import Sequence
from math import inf

Matrix = Sequence[Sequence[float]]


def match_bottleneck(bottlenecks: Matrix, *, costs: Matrix) -> list[int]:
    """Return the column of every row.

    bottlenecks, costs: [rows][columns], finite, with at least as many columns as rows. First the least T is found for which a
    matching exists whose bottlenecks are all <= T (binary search over the entries, augmenting paths; Entrain 4.5.2), then the
    matching of least total cost within it (shortest augmenting paths, as in scipy.optimize.linear_sum_assignment).

    Of equally good columns the first is taken. O(rows^2 x columns x log(entries)) and O(rows^2 x columns).
    """
    if not bottlenecks:
        return []
    threshold = least_bottleneck(bottlenecks)
    allowed = [
        [cost if bottleneck <= threshold else inf for cost, bottleneck in zip(*rows, strict=True)]
        for rows in zip(costs, bottlenecks, strict=True)
    ]
    return _least_cost_matching(allowed)


def least_bottleneck(bottlenecks: Matrix) -> float:
    """Return the least T for which every row can have a column of its own with an entry <= T."""
    candidates = sorted({entry for row in bottlenecks for entry in row})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _can_match(bottlenecks, candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low]


def _can_match(bottlenecks: Matrix, threshold: float) -> bool:
    row_of_column = [-1] * len(bottlenecks[0])

    def augment(row: int, seen: list[bool]) -> bool:
        for column, entry in enumerate(bottlenecks[row]):
            if entry <= threshold and not seen[column]:
                seen[column] = True
                if row_of_column[column] < 0 or augment(row_of_column[column], seen):
                    row_of_column[column] = row
                    return True
        return False

    return all(augment(row, [False] * len(row_of_column)) for row in range(len(bottlenecks)))


def _least_cost_matching(costs: Matrix) -> list[int]:
    """Match every row; `costs` may hold infinite entries as long as a finite matching exists."""
    num_columns = len(costs[0])
    row_price, column_price = [0.0] * len(costs), [0.0] * num_columns
    row_of_column, column_of_row = [-1] * num_columns, [-1] * len(costs)
    for free_row in range(len(costs)):
        distance, before = [inf] * num_columns, [-1] * num_columns
        done: list[int] = []
        is_done = [False] * num_columns
        row, reached = free_row, 0.0
        while True:
            for column in range(num_columns):
                if not is_done[column]:
                    candidate = reached + costs[row][column] - row_price[row] - column_price[column]
                    if candidate < distance[column]:
                        distance[column], before[column] = candidate, row
            nearest = min((column for column in range(num_columns) if not is_done[column]), key=distance.__getitem__)
            reached = distance[nearest]
            is_done[nearest] = True
            done.append(nearest)
            if row_of_column[nearest] < 0:
                break
            row = row_of_column[nearest]
        row_price[free_row] += reached
        for column in done[:-1]:
            row_price[row_of_column[column]] += reached - distance[column]
            column_price[column] -= reached - distance[column]
        column = done[-1]
        while True:
            row = before[column]
            row_of_column[column] = row
            column_of_row[row], column = column, column_of_row[row]
            if row == free_row:
                break
    return column_of_row
