"""How far the predicted step is from the measured one, on the machine that was profiled.

Whole runs with two workers, as a user starts them: profile, plan, train. The error of a run is that
of its prediction, made before training, against the median of the steps that followed.

    python benchmarks/prediction/main.py
"""

import sys
import tempfile
from pathlib import Path

import paceline

CASES = (
    ("lenet5", "digits", 64, 25, 9),
    ("resnet18", "synthetic:3x224x224,samples=96", 16, 2, 2),
    ("googlenet", "synthetic:3x224x224,samples=96", 16, 2, 2),
    ("alexnet", "synthetic:3x227x227,samples=192", 32, 2, 2),
)


def run(model: str, data: str, batch_size: int, epochs: int) -> dict[str, float]:
    """Return what one run predicted and measured."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"batch_size": batch_size, "epochs": epochs, "learning_rate": 0.001}
        result = paceline.train(model, data, workers=2, output=folder, **settings).result
    return {
        "predicted_step_s": result.predicted_step_s,
        "measured_step_s": result.step_s,
        "error": result.prediction_error,
        "peak_memory_bytes": max(result.peak_memory_bytes),
    }


def main() -> None:
    """Run all cases and print the table."""
    from figures import shown, spread, write

    figures = {}
    head = ("predicted ms [quartiles]", "measured ms [quartiles]", "median |error| %", "worst %")
    print(f"{'case':22} {head[0]:28} {head[1]:28} {head[2]:>16} {head[3]:>8}")
    for model, data, batch_size, epochs, repeats in CASES:
        rows = [run(model, data, batch_size, epochs) for _ in range(repeats)]
        figure = {key: spread([row[key] for row in rows]) for key in rows[0]}
        figure["absolute_error"] = spread([abs(row["error"]) for row in rows])
        case = f"{model} batch {batch_size}"
        figures[case] = {"runs": rows, **figure}
        worst = max((row["error"] for row in rows), key=abs)
        print(
            f"{case:22} {shown(figure['predicted_step_s'], 1e3, 2):28} "
            f"{shown(figure['measured_step_s'], 1e3, 2):28} "
            f"{100 * figure['absolute_error']['median']:16.1f} {100 * worst:+8.1f}",
            flush=True,
        )
    write(Path(__file__).parent, figures)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
