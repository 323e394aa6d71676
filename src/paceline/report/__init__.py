"""One HTML page about a run, drawn from the files of its folder and from nothing else."""

from paceline.report.folder import write_report

__all__ = ["write_report"]
