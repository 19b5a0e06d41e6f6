"""Mixtures of experts of a plan by a ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.models.plans.plan import ONE_GROUP, Gate, LinearPlan, MixturePlan

Raw = Mapping[str, Any]

_OF_NO_MATTER = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
_COUNTS = ("num_experts", "num_local_experts")
_OF_QWEN = ("decoder_sparse_step", "mlp_only_layers")
_OF_GATE = ("swiglu_alpha", "swiglu_limit")

READ = frozenset((*_COUNTS, *_OF_NO_MATTER, "num_experts_per_tok", "norm_topk_prob"))
"""Fields of all families with experts, which are read here or change nothing."""


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Mixtures of a family, as they differ from others'.

    Attributes:
        router: module within a layer's ``block``.
        block: module of a layer; empty: router and experts are the layer's own.
        is_normalised: true if shares are divided by their sum; None: a field says it.
        rounds_shares: true if shares are rounded to the type of the rows.
        is_crossed: true if experts' matrices are the other way round, with biases, and their gate
            is that of gpt-oss.
        has_dense: true if fields say which layers have an MLP in place of experts.
        shared: module of an MLP that all tokens have, whose share is ``<module>_gate``'s.
        is_beside: true if the layer has its MLP, too; there may be no experts then.
        has_share: false if that of all tokens is added as it is.
        is_sigmoid: true if scores are sigmoids.
        correction: tensor within the block that is added to scores only to choose; None: none is.
        rounds_logits: true if logits are rounded to the type of the rows.
        scale: field of a factor on shares; None: there is none.
        n_best: experts of a group by which it is chosen, where there are groups.
    """

    router: str = "gate"
    block: str = "mlp"
    is_normalised: bool | None = None
    rounds_shares: bool = True
    is_crossed: bool = False
    has_dense: bool = False
    shared: str | None = None
    is_beside: bool = False
    has_share: bool = True
    is_sigmoid: bool = False
    correction: str | None = None
    rounds_logits: bool = True
    scale: str | None = None
    n_best: int = 2

    def are_in(self, raw: Raw, layer: int) -> bool:
        """Return true if a layer has experts."""
        if self.is_beside:
            return bool(raw["num_local_experts"])
        if not self.has_dense:
            return True
        is_dense = layer in (raw.get("mlp_only_layers") or ())
        return not is_dense and (layer + 1) % raw.get("decoder_sparse_step", 1) == 0

    def inner_size(self, raw: Raw) -> int:
        """Return the numbers per token inside of a layer's experts, or its widest matrix."""
        inner = max(raw["hidden_size"], raw.get("moe_intermediate_size", raw["intermediate_size"]))
        widths: list[int] = [raw["num_experts_per_tok"] * inner]
        if not all(self.are_in(raw, layer) for layer in range(raw["num_hidden_layers"])):
            widths.append(raw["intermediate_size"])
        if self.shared is not None:
            widths.append(raw[f"{self.shared}_intermediate_size"])
        return max(widths)

    def gate(self, raw: Raw) -> Gate | None:
        """Return the gate of experts; None: it is that of the config's activation."""
        if not self.is_crossed:
            return None
        alpha, limit = (
            float(raw.get(name, usual)) for name, usual in zip(_OF_GATE, (1.702, 7.0), strict=True)
        )
        return alpha, 0.0, 1.0, limit

    def plan(self, raw: Raw, layer: str) -> MixturePlan:
        """Plan the mixture of a layer.

        Raises:
            ValueError: it has fewer experts than a token chooses, nobody says how many, or if
                shares are normalised, or groups of experts are of no size.
        """
        n_experts = next((raw[name] for name in _COUNTS if raw.get(name)), 0)
        n_chosen = raw["num_experts_per_tok"]
        is_normalised = self.is_normalised
        if is_normalised is None:
            is_normalised = raw["norm_topk_prob"]
        are_whole = type(n_experts) is int and type(n_chosen) is int
        if not are_whole or not 0 < n_chosen <= n_experts or not isinstance(is_normalised, bool):
            raise ValueError("no rule for such experts")
        within = f"{layer}.{self.block}" if self.block else layer
        up, down = (f"{within}.experts.{name}_proj" for name in ("gate_up", "down"))
        router, share = f"{within}.{self.router}", f"{within}.{self.shared}_gate"
        return MixturePlan(
            LinearPlan((f"{router}.weight",), (f"{router}.bias" if self.is_crossed else None,)),
            n_chosen,
            is_normalised,
            self.rounds_shares,
            up,
            down,
            biases=(f"{up}_bias", f"{down}_bias") if self.is_crossed else None,
            is_crossed=self.is_crossed,
            share=LinearPlan((f"{share}.weight",), (None,))
            if self.shared is not None and self.has_share
            else None,
            scale=1.0 if self.scale is None else float(raw[self.scale]),
            is_sigmoid=self.is_sigmoid,
            correction=None if self.correction is None else f"{within}.{self.correction}",
            rounds_logits=self.rounds_logits,
            groups=self._groups(raw, n_experts),
        )

    def _groups(self, raw: Raw, n_experts: int) -> tuple[int, int, int]:
        """Return the groups of experts, as in a plan.

        Raises:
            ValueError: they are of other sizes than the experts make.
        """
        n_groups, n_kept = raw.get("n_group") or 1, raw.get("topk_group") or 1
        if type(n_groups) is not int or type(n_kept) is not int or not 0 < n_kept <= n_groups:
            raise ValueError("no rule for such groups")
        n_chosen: int = raw["num_experts_per_tok"]
        if n_kept == n_groups or (self.n_best == 1 and n_kept >= n_chosen):
            return ONE_GROUP  # the best experts are in the best groups
        in_each, rest = divmod(n_experts, n_groups)
        if rest or in_each < 2 or in_each * n_kept < n_chosen:
            raise ValueError("no rule for groups of such sizes")
        return n_groups, n_kept, self.n_best


OF_QWEN = frozenset((*_OF_QWEN, "moe_intermediate_size", "shared_expert_intermediate_size"))
"""Fields of mixtures of Qwen."""

OF_GPT_OSS = frozenset((*_OF_GATE, "quantization_config"))
"""Fields of mixtures of gpt-oss."""
