"""``dapo report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dapo.commands.shared.options import Run
from dapo.commands.shared.output import print_lines
from dapo.errors import UserError, install


def report(
    run: Run,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write to; by default report/ in the run folder.")
    ] = None,
) -> None:
    """Write what a run learned, what it cost and how to do it again: report.html, and report.md with plots.

    Of a folder of dapo compare it tells what came of the comparison. Works while the run is at work, too. The HTML
    file needs no other file and no network.
    """
    from dapo.comparison.folder import is_comparison
    from dapo.comparison.pages import write_pages
    from dapo.comparison.table import Table
    from dapo.observe.run_view import RunView

    try:
        if is_comparison(run):
            pages = write_pages(Table.read(run), output)
        else:
            found = RunView.read(run)
            from dapo.commands.report.content import sections_of
            from dapo.util.pages import write_report

            pages = write_report(f"Report of {run.resolve().name}", sections_of(found), output or run / "report")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UserError(f"dapo report needs matplotlib, which is not installed: {install('report')}") from None
    print_lines(map(str, pages))
