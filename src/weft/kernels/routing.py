"""How the scores of a router choose experts, and what weighs their results. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

SCORINGS = ("softmax", "sigmoid")
LEAST_SUM = 1e-20  # is added to what shares are divided by


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighed.

    A token's weights are the softmax of its scores, or the sigmoid of each. The ``top_k`` experts
    with the largest weights are chosen, where there is a correction bias by the sum of weight and
    bias (DeepSeek-V3, section 2.1.2); their weights without it become their shares.

    Attributes:
        top_k: experts of a token.
        normalise: shares of a token are divided by their sum. A softmax of the chosen scores alone,
            as in gpt-oss and Granite, is this one of all scores, normalised.
        scoring: one of ``SCORINGS``.
        n_group, topk_group: experts stand in so many groups of equal size, one behind the other, of
            which so many are chosen from.
        group_best: what ranks a group is the sum of so many of its best weights: 2 in DeepSeek-V3,
            1 in DeepSeek-V2.
        routed_scaling_factor: multiplies shares at the end.
    """

    top_k: int
    normalise: bool = False
    scoring: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    group_best: int = 2
    routed_scaling_factor: float = 1.0

    def check(self, experts: int) -> None:
        """Raise ValueError if so many experts cannot be chosen from like this."""
        if self.scoring not in SCORINGS:
            raise ValueError(f"unknown scoring '{self.scoring}'; known: {', '.join(SCORINGS)}")
        if not 0 < self.top_k <= experts:
            raise ValueError(f"{self.top_k} of {experts} experts cannot be chosen")
        if self.n_group < 1 or experts % self.n_group:
            raise ValueError(f"{experts} experts cannot stand in {self.n_group} groups")
        size = experts // self.n_group
        if not 0 < self.topk_group <= self.n_group or self.top_k > self.topk_group * size:
            raise ValueError(
                f"{self.top_k} experts cannot be chosen from {self.topk_group} of {self.n_group} "
                f"groups of {size}"
            )
        if not 0 < self.group_best <= size and self.topk_group < self.n_group:
            raise ValueError(f"the best {self.group_best} of {size} experts cannot rank a group")
