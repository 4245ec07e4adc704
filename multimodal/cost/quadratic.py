"""Seconds as a quadratic in tokens (Entrain 4.4.1)."""

from typing import NamedTuple


class Quadratic(NamedTuple):
    """`constant + linear x tokens + quadratic x squares`; for one sequence of x tokens `c0 + c1 x + c2 x^2`.

    For sequences packed together, `squares` is the sum of the squares of their lengths: tokens attend inside their own sequence
    only, so the form is exact for packing, too.
    """

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0

    def at(self, num_tokens: float, num_squared: float) -> float:
        """Evaluate."""
        return self.constant + self.linear * num_tokens + self.quadratic * num_squared

    def shared(self, factor: float) -> "Quadratic":
        """The same work times `factor`, as on more or fewer ranks; what a kernel costs whatever its size stays."""
        return Quadratic(self.constant, factor * self.linear, factor * self.quadratic)

    def times(self, factor: float) -> "Quadratic":
        """Scale."""
        return Quadratic(factor * self.constant, factor * self.linear, factor * self.quadratic)

    def plus(self, *others: "Quadratic") -> "Quadratic":
        """Sum up."""
        return Quadratic(*map(sum, zip(self, *others, strict=True)))
