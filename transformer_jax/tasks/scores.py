"""Figures for translations, by sacreBLEU: on raw text, so that they can be compared with anybody's."""

from collections.abc import Sequence
from typing import Literal

BleuTokenizer = Literal["13a", "intl", "zh", "char"]


def translation_scores(
    outputs: Sequence[str], references: Sequence[str], tokenizer: BleuTokenizer = "13a"
) -> dict[str, float | str]:
    """BLEU and chrF of a whole set, with the signatures that say how they were computed (Post 2018)."""
    from sacrebleu.metrics import BLEU, CHRF  # slow to import, and only needed here

    # `force` only silences a guess: our references may well look tokenized, and are scored as they are.
    figures: dict[str, float | str] = {}
    for name, metric in (("bleu", BLEU(tokenize=tokenizer, force=True)), ("chrf", CHRF())):
        figures[name] = metric.corpus_score(list(outputs), [list(references)]).score
        figures[f"{name}_signature"] = str(metric.get_signature())
    return figures
