"""The glossary answers to the words of default screens, of the field, and of earlier versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from profiler.report.glossary import GLOSSARY, known_term

SCREENS = [Path(__file__).parents[1] / "golden" / f"judge{name}.txt" for name in ("", "-h100", "-h200-default")]
EVERYDAY = frozenset(re.findall(r"\w+", """
    a about after against all and are as at b be before between builds but by copy costs default device doubled does
    during each export false fell figures first for from full g give goes gpu h has have here html in instead it its
    judge known layer length library limited line load loading longer lose low m measured model modes more most ms name
    needs next no not nvidia of on once one only or other p per plan power process processor profile published random
    reach reading recorded report row run s save says several share show similar size small t table take than that the
    their them then this time to token torch two under up us was what where which with within without work would import
    enable explain xeon high measure bar cap clock gb mhz none
"""))  # fmt: skip
"""Words of plain English and of any engineer, in the singular."""
CODE = re.compile(r"\S*[_.=()/]\S*[a-z)]|--[a-z-]+|\$.*|roofscope [a-z-]+( TERM)?|\bx[0-9]+")


def test_every_word_of_a_default_screen_is_everyday_or_in_the_glossary() -> None:
    """Lines of code, options, paths and names of models are not words."""
    in_terms = {word for term in GLOSSARY for word in re.findall(r"[a-z]+", term.lower())}
    for screen in SCREENS:
        text = re.sub(r"^.*parameters, .*$", "", screen.read_text(), flags=re.MULTILINE)
        units = re.findall(r"[GTM]?(?:FLOP|B)/s", text)
        words = {word.lower() for word in re.findall(r"[A-Za-z][A-Za-z0-9]*(?:-[a-z]+)*", CODE.sub(" ", text))} | set(
            units
        )
        unknown = {word for word in words if not _is_known(word, in_terms)}
        assert not unknown, f"{screen.name}: give these a term or a synonym"


def _is_known(word: str, in_terms: set[str]) -> bool:
    forms = {word, word.removesuffix("s"), word.removesuffix("d"), word.removesuffix("es")}
    return any(form in EVERYDAY or form in in_terms or known_term(form) for form in forms)


@pytest.mark.parametrize(
    ("word", "term"),
    [
        ("kernel-bound", "slow-kernels"), ("dispatch", "overhead"), ("roof", "ceiling"),
        ("avoidable work", "redundant work"), ("visit", "repetition"), ("sure", "confidence"), ("lever", "change"),
        ("variant", "change"), ("product", "matmul"), ("witness", "weight read"), ("sentinel", "drift"),
        ("twin", "overhead model"), ("split", "time breakdown"), ("room", "free memory"),
        ("tight", "close to the limit"), ("tax", "overhead of generate"),
        ("bandwidth", "ceiling"), ("latency", "TPOT"), ("throughput", "tok/s"), ("batch", "batch x tokens"),
        ("peak", "ceiling"), ("arithmetic intensity", "intensity"), ("TTFT", "TTFT"), ("launch overhead", "overhead"),
        ("SOL", "floor"), ("MFU", "MFU"), ("GQA", "GQA"), ("quantization", "quantization"),
        ("OOM", "close to the limit"),
        ("throttling", "throttling"), ("power cap", "sustained"), ("eager", "eager"), ("budget", "budget"),
    ],
)  # fmt: skip
def test_explain_knows_old_words_and_those_of_the_field(word: str, term: str) -> None:
    assert known_term(word) == term
    assert term in GLOSSARY
