"""The glossary answers to the words of default screens, of the field, and of earlier versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from profiler.report.glossary import GLOSSARY, known_term

NAMES = ("judge", "judge-h100", "judge-h100-engines", "judge-h200-default", "compare", "forecast")
SCREENS = [Path(__file__).parents[1] / "golden" / f"{name}.txt" for name in NAMES]
EVERYDAY = frozenset(re.findall(r"\w+", """
    a about adds after again against all amd and are as at b bar basis be before below between beyond both builds but by
    cap clock common contain copy costs cpu default device differ does doubled during each else enable epyc error
    explain export false family faster fell figures first for foreign from full g gb give goes gpu grid h had has have
    held here high how html import in include instead it its itself judge keep known larger largest layer length library
    limited line load loading longer longest lose low m machine measure measured median mhz model modes more most ms
    much name nearest needs neither next nine no none not nothing nvidia of off on once one only or other over own p per
    phase plan power process processor profile published random reach reading reason recorded replayed report rest row
    run s save says second seen several share show side similar size small t table take taken ten tensor than that the
    their them then there they this thread time to token torch two under up us utc verdict wait was what when where
    which with within without work would xeon
"""))  # fmt: skip
"""Words of plain English and of any engineer, in the singular."""
CODE = re.compile(
    r"""(?<![\w-]) (?: \$.* | --[a-z-]+ | roofscope\ [a-z-]+(?:\ TERM)? | x[0-9]+ | smollm2-135m
    | "?[\w.~-]*\w [_=/.(] ["\w.]\S* )""",
    re.VERBOSE,
)


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
