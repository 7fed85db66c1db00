"""The page about watching a run lists what there is."""

from __future__ import annotations

from everstep.observe.prometheus import table

from .pages import PAGES


def test_every_metric_is_on_the_page() -> None:
    page = PAGES["docs/watching.md"].read_text()
    listed = page.partition("<!-- metrics -->\n")[2].partition("<!-- end of metrics -->")[0]
    assert listed == table(), "put what everstep.observe.prometheus.table() gives between the two comments"
