"""What preference training changed, on held-out pairs: implicit rewards (arXiv 2305.18290) and the distance moved."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rbd_train.metrics import Rate, mean_rate
from rbd_train.records import Preference, Reward
from rbd_train.run import Cell, Run, Table

if TYPE_CHECKING:
    from rbd_train.dpo import Pair
    from rbd_train.preference_trainer import Tokens


def kl(before: "Sequence[Tokens]", after: "Sequence[Tokens]", groups: Sequence[str]) -> Rate:
    """Estimate KL(reference || trained) in nats per token, at the positions of held-out answers.

    Each position has one token, drawn from the reference; with r = p(trained) / p(reference) the mean of r - 1 - log r
    is the KL without bias, and no term is below 0. A pair counts as the mean of its positions.
    """
    values = []
    for old, new in zip(before, after, strict=True):
        logs = [b - a for a, b in zip(old.log_probs, new.log_probs, strict=True)]
        values.append(sum(math.expm1(log) - log for log in logs) / len(logs))
    return mean_rate(values, groups)


def rewards_of(
    preferences: dict[str, Preference], held: "Sequence[Pair]", before: Sequence[tuple[float, float]],
    after: Sequence[tuple[float, float]], beta: float,
) -> list[Reward]:  # fmt: skip
    """Return each held-out pair's implicit reward margin: beta times what chosen gained over rejected."""
    rewards = []
    for pair, old, new in zip(held, before, after, strict=True):
        preference = preferences[pair.id]
        gains = new[0] - old[0], new[1] - old[1]
        rewards.append(
            Reward(
                id=pair.id, bias=preference.bias, group=preference.group, domain=preference.domain,
                margin=beta * (gains[0] - gains[1]), reference_margin=old[0] - old[1],
                log_ratio=(abs(gains[0]) + abs(gains[1])) / (len(pair.chosen_ids) + len(pair.rejected_ids)),
            )
        )  # fmt: skip
    return rewards


def rewards_table(rewards: Sequence[Reward], model: str, divergence: Rate) -> Table:
    """Show error and margin of the implicit reward per bias, with the base's own log-probabilities beside."""
    rows: list[tuple[Cell, ...]] = []
    for bias in sorted({reward.bias or "" for reward in rewards}):
        own = [reward for reward in rewards if (reward.bias or "") == bias]
        groups = [reward.group for reward in own]
        rows.append(
            (bias or "plain", len(own), mean_rate([float(r.margin <= 0) for r in own], groups),
             mean_rate([float(r.reference_margin <= 0) for r in own], groups),
             mean_rate([r.margin for r in own], groups), mean_rate([r.log_ratio for r in own], groups))
        )  # fmt: skip
    note = (
        f"Trained from {model}. Implicit reward: beta x what an answer's log-probability gained over the reference; it "
        "is wrong where the rejected answer gained as much or more. Base: wrong where the rejected answer is as "
        f"likely. KL(base || trained) per token, at positions of {divergence.n} pairs' answers: "
        f"{small(divergence)} nats."
    )
    columns = ("bias", "pairs", "error", "error of the base's log-probability", "margin", "|log-ratio| per token")
    return Table(name="dpo", title="Implicit reward on held-out pairs", columns=columns, rows=tuple(rows), note=note)


def small(rate: Rate) -> str:
    """Write a figure that may be far below a thousandth, with its interval; undefined is a dash."""
    if rate.value is None:
        return "–"
    interval = "" if rate.low is None or rate.high is None else f" [{rate.low:.2g}, {rate.high:.2g}]"
    return f"{rate.value:.2g}{interval}"


def report(trainer: Any, rewards: Sequence[Reward], divergence: Rate, run: Run) -> None:
    """Keep the headline figures, and send them to the tracker."""
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    run.facts |= {"first_loss": losses[0]["loss"], "last_loss": losses[-1]["loss"]}
    run.outputs |= {"model": {"sha256": None, "rows": None}} if run.main else {}
    groups = [reward.group for reward in rewards]
    run.figure("dpo.error", mean_rate([float(r.margin <= 0) for r in rewards], groups))
    run.figure("dpo.margin", mean_rate([r.margin for r in rewards], groups))
    run.figure("dpo.kl", divergence)
    run.figure("dpo.first_loss", Rate(value=losses[0]["loss"], n=1))
    told = {} if divergence.value is None else {"kl": divergence.value}
    for bias in {reward.bias or "" for reward in rewards}:
        own = [reward for reward in rewards if (reward.bias or "") == bias]
        told[f"accuracy_{bias or 'plain'}"] = sum(r.margin > 0 for r in own) / len(own)
    run.event("held_out", margin=sum(r.margin for r in rewards) / max(1, len(rewards)),
              log_ratio=sum(r.log_ratio for r in rewards) / max(1, len(rewards)), **told)  # fmt: skip
