"""Prints sentences that users read, at random, and those that break a rule of `faults`.

python -m docs.sentences --number 100 --seed 1
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from statistics import mean

import typer

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "dnis_torchrec" / "report" / "templates"
RIDDLES = re.compile(r"\b(nobody|somebody|lies|stands|dies)\b", re.IGNORECASE)
"""Each has a plainer word. Literal uses are code, in backticks."""
_CODE = re.compile(r"^```.*?^```|^\$\$.*?\$\$$|<!--.*?-->|^    .*?$", re.DOTALL | re.MULTILINE)
_NO_PROSE = re.compile(r"^\|.*$|^#.*$|^!\[.*$|^\W+$", re.MULTILINE)
_END = re.compile(r"(?<=[.!?])[*\")]*\s+(?=[*\"(\[`]*[A-Z0-9`])")


def sentences(markdown: str) -> list[str]:
    """Sentences of a page's prose: no code blocks, tables, headings or pictures, and the text of links alone.

    Example:
        >>> sentences("# Title\\n\\nOne [link](x.md). Two,\\nin two lines.\\n\\n- an item\\n")
        ['One link.', 'Two, in two lines.', 'an item']
    """
    prose = _NO_PROSE.sub("", _CODE.sub("", markdown))
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
    joined = (re.sub(r"^(?:[-*]|\d+\.) ", "", " ".join(part.split())) for part in paragraphs)
    found = (sentence for part in joined for sentence in _END.split(part))
    return [sentence for sentence in found if re.search(r"[^\W\d]{2}", re.sub(r"`[^`]*`", "", sentence))]


def help_texts() -> str:
    """The help of every command and option of `dnis`, a paragraph each."""
    from dnis_torchrec.cli import app

    commands = typer.main.get_command(app).commands.values()
    texts = [part.help for command in commands for part in (command, *command.params)]
    return "\n\n".join(text.strip() for text in texts if text)


def report_texts() -> str:
    """Texts of the report's page without its tags and scripts."""
    page = "\n".join(file.read_text(encoding="utf-8") for file in sorted(TEMPLATES.glob("*.html*")))
    page = re.sub(r"<(script|style)\b.*?</\1>|{#.*?#}", "", page, flags=re.DOTALL)
    page = re.sub(r"{{.*?}}|{%.*?%}", "`value`", page, flags=re.DOTALL)
    page = re.sub(r"</?(?:code|b|strong|em|a|span)\b[^>]*>", "", page)
    return re.sub(r"<[^>]*>", "\n\n", page)


def all_sentences() -> list[tuple[str, str]]:
    """(place, sentence) of everything that users read."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    texts |= {"dnis --help": help_texts(), "report": report_texts()}
    return [*dict.fromkeys((place, sentence) for place, text in texts.items() for sentence in sentences(text))]


def faults(sentence: str) -> list[str]:
    """Rules that a sentence breaks."""
    prose = re.sub(r"`[^`]*`", "code", sentence)
    rules = {
        "long": len(sentence.split()) > 30,
        "number first": bool(re.match(r"\d", sentence)),
        "word": bool(RIDDLES.search(prose)),
        "zero": bool(re.search(r"(?<![\w.])\.\d", prose)),
    }
    return [rule for rule, is_broken in rules.items() if is_broken]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    everything = all_sentences()
    for place, sentence in random.Random(arguments.seed).sample(everything, min(arguments.number, len(everything))):
        print(f"{place}: {sentence}")
    words = mean(len(sentence.split()) for _, sentence in everything)
    print(f"\n{len(everything)} sentences, {words:.1f} words on average")
    for place, sentence in everything:
        if faults(sentence):
            print(*faults(sentence), place, sentence, sep=": ")
