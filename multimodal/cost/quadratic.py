"""Seconds as a quadratic in tokens (Entrain 4.4.1), and linear in the number of packed sequences."""

from typing import NamedTuple


class Quadratic(NamedTuple):
    """`constant + linear x tokens + quadratic x squares + sequence x sequences`.

    For sequences packed together, `squares` is the sum of the squares of their lengths: tokens attend inside their own sequence
    only, so the form is exact for packing, too. `sequence` is what each of them adds whatever its length, such as the calls of an
    attention that takes one sequence at a time.
    """

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0
    sequence: float = 0.0

    def at(self, num_tokens: float, num_squared: float, num_sequences: float = 1) -> float:
        """Evaluate."""
        return self.constant + self.linear * num_tokens + self.quadratic * num_squared + self.sequence * num_sequences

    def shared(self, factor: float) -> "Quadratic":
        """The same work times `factor`, as on more or fewer ranks; what calls cost whatever their size stays."""
        return Quadratic(self.constant, factor * self.linear, factor * self.quadratic, self.sequence)

    def times(self, factor: float) -> "Quadratic":
        """Scale."""
        return Quadratic(*(factor * coefficient for coefficient in self))

    def plus(self, *others: "Quadratic") -> "Quadratic":
        """Sum up."""
        return Quadratic(*map(sum, zip(self, *others, strict=True)))
