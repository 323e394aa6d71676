"""HTML reports, built only from the files in a run's folder."""

from paceline.report.folder import write_report

__all__ = ["write_report"]
