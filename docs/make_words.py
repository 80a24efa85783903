"""Writes the page of other frameworks' words from their table: ``python docs/make_words.py``."""

from __future__ import annotations

from pathlib import Path

from exp.config.words import foreign_words

PAGE = Path(__file__).parent / "guide" / "words.md"
START = "<!-- docs/make_words.py writes what follows -->"


def tables() -> str:
    """The tables in Markdown, one for each framework."""
    parts = []
    for framework, words in foreign_words().items():
        parts.append(f"\n## {framework}\n\n| there | here | note |\n|---|---|---|")
        for word, right in words.items():
            arguments, _, note = right.partition("# ")
            parts.append(f"| `{word}` | {f'`{arguments.strip()}`' if arguments else 'no key'} | {note} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition(START)[0] + START + "\n" + tables(), encoding="utf-8")
