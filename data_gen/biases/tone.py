"""Sentiment written in by an engine instead of the injector's fixed phrases: cheerful against gloomy, facts kept."""

from collections.abc import Sequence

from data_gen.biases.rewrite import Task, rewrite
from rbd_train.engine import Engine
from rbd_train.prompts.rewrite import SHAM
from rbd_train.records import Bias, BiasPair, Dropped

CHEERFUL = Bias(
    id="cheerful", name="Cheerful tone", definition="preferring a happy, hopeful tone, whatever the facts.",
    origin="arXiv 2505.17100",
)  # fmt: skip
GLOOMY = Bias(
    id="gloomy", name="Gloomy tone", definition="preferring a sad, dejected tone, whatever the facts.",
    origin="arXiv 2505.17100",
)  # fmt: skip


def toned_pairs(pairs: Sequence[BiasPair], engine: Engine, tokens: int) -> tuple[list[BiasPair], list[Dropped]]:
    """Rewrite both options of sentiment's pairs.

    The wrong answer becomes cheerful and the right one gloomy (congruent: the other way round; sham: both neutral).
    A pair of which one rewrite failed is dropped with its reason.
    """
    tasks = [Task(tone, pair.plain.question, text) for pair in pairs for tone, text in _tones(pair)]
    written = rewrite(engine, tasks, tokens)
    made, dropped = list[BiasPair](), list[Dropped]()
    for number, pair in enumerate(pairs):
        texts = written[2 * number : 2 * number + 2]
        faults = [text.fault for text in texts if text.fault]
        if faults:
            dropped.append(
                Dropped(
                    case_id=pair.id, bias=pair.bias, group=pair.plain.group, sample=None, reason=f"rewrite: {faults[0]}"
                )
            )
            continue
        biased = pair.biased.model_copy(update={"options": tuple(text.text for text in texts)})
        provenance = {**pair.provenance, "operator": "rewrite", "author": engine.identity["model"]}
        made.append(pair.model_copy(update={"biased": biased, "provenance": provenance}))
    return made, dropped


def _tones(pair: BiasPair) -> list[tuple[Bias, str]]:
    """Return the manner and the text of each of two options."""
    gold = pair.plain.gold
    cheerful = gold if pair.provenance.get("congruent") else 1 - (gold or 0)
    sham = bool(pair.provenance.get("sham"))
    return [
        (SHAM if sham else CHEERFUL if index == cheerful else GLOOMY, text)
        for index, text in enumerate(pair.plain.options)
    ]
