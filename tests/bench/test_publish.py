"""Pages with numbers are made from recorded runs and from nothing else."""

import importlib.util
import re

from rich.table import Table

from bench import publish
from bench.__main__ import USAGE


def test_pages_are_what_the_records_make_of_them():
    for page, text in publish.pages(publish.DOCS / "results").items():
        assert (publish.DOCS / page).read_text() == text, f"docs/{page} is stale: python -m bench.publish"


def test_without_a_record_the_page_says_so(tmp_path):
    assert all(text.endswith(publish.NOT_RUN) for text in publish.pages(tmp_path).values())


def test_table_becomes_markdown():
    table = Table("a", "b", title="Title")
    table.columns[1].justify = "right"
    table.add_row("x|y", "1")
    assert publish.markdown(table) == "## Title\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_usage_names_parts_that_exist():
    parts = re.findall(r"python -m (bench\.\w+)", USAGE)
    assert "bench.operators" in parts
    assert all(importlib.util.find_spec(part) for part in parts)
