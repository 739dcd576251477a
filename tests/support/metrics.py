"""The distance metrics as they are defined, written down once more in Python: all tests of metrics go over these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    #: None where there is none
    distance: Callable[[Vector, Vector], float | None]
    #: of pgvector, for columns of type vector
    operator_class: str
    #: similarity = 1 - distance; else 1 / (1 + distance)
    is_complement: bool

    def similarity(self, distance: float) -> float:
        return 1 - distance if self.is_complement else 1 / (1 + distance)


def cosine(x: Vector, y: Vector) -> float | None:
    """A vector of zeros has no direction."""
    lengths = math.sqrt(float(x @ x) * float(y @ y))
    return None if lengths == 0 else 1 - max(-1.0, min(1.0, float(x @ y) / lengths))


METRICS: dict[str, Metric] = {
    "COSINE": Metric(cosine, "vector_cosine_ops", True),
    "DOT": Metric(lambda x, y: 1 - float(x @ y), "vector_ip_ops", True),
    "EUCLIDEAN": Metric(lambda x, y: math.sqrt(float((x - y) @ (x - y))), "vector_l2_ops", False),
    "MANHATTAN": Metric(lambda x, y: float(np.abs(x - y).sum()), "vector_l1_ops", False),
}


def distance(metric: str, a: Any, b: Any) -> float | None:
    """None where there is none: the cosine of a zero vector."""
    return METRICS[metric].distance(np.asarray(a, float), np.asarray(b, float))
