"""Text from files: lines that end in \\n or \\r\\n, plain or gzip, checked and named so that errors can point at them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelText:
    """Aligned sentences: `target[i]` translates `source[i]`. The names (files, or what made the text) appear in errors."""

    source: list[str]
    target: list[str]
    source_name: str
    target_name: str

    def __post_init__(self):
        if len(self.source) != len(self.target):
            raise ValueError(
                f"{self.source_name} has {len(self.source)} lines, {self.target_name} has {len(self.target)}: "
                "line i of one must translate line i of the other"
            )

    def __len__(self):
        return len(self.source)
