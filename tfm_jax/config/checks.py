"""What a value of a configuration must satisfy."""

import dataclasses
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_rates(name: str, config: Any) -> None:
    """Every field of a dataclass of rates must lie in [0, 1)."""
    for key, rate in dataclasses.asdict(config).items():
        require(0.0 <= rate < 1.0, f"{name}.{key} is {rate}: a dropout rate lies in [0, 1)")
