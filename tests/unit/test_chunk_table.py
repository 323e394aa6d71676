"""The table of a search for a chunk size."""

from paceline.tables import chunk_table, console
from paceline.tune.chunk import Trial


def test_the_chosen_size_is_marked_and_a_missing_prediction_is_empty():
    trials = [Trial(6, 0.25, 0.2), Trial(4, None, 0.004)]
    printer = console()
    with printer.capture() as capture:
        printer.print(chunk_table(trials, chosen=6))
    rows = [line.strip("│").split("│") for line in capture.get().splitlines() if "ms" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["6", "250 ms", "200 ms", "chosen"],
        ["4", "", "4.00 ms", ""],
    ]
