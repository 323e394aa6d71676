"""What the command line says of a rehearsal of wheel that cannot be, before any process starts."""

import pytest

REHEARSE = ("rehearse", "lenet5", "--strategy", "wheel")
PACED = ("--device", "k40-gigabit/gpu0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "device, stretch: neither is given"),
        (("--device", "abacus"), "device: 'abacus' is not known; choose one of"),
        ((*PACED, "--stretch", "2"), "stretch: goes not with strategy wheel"),
        ((*PACED, "--chunk-search", "runtime"), "chunk_search: goes not with strategy wheel"),
        ((*PACED, "--port", "7"), "port: goes not with strategy wheel"),
        ((*PACED, "--keys", "none"), "keys: are for workers of other machines"),
        ((*PACED, "--steps", "2"), "steps: Input should be greater than or equal to 3"),
        ((*PACED, "--workers", "65"), "batch_size: 64 samples cannot be shared by 65 workers"),
        ((*PACED, "--workers", "60"), "workers: 31 do not fit on"),
        ((*PACED, "--set", "head=none"), "head: 'none' is no layer of model lenet5"),
        ((*PACED, "--codec", "labels=half"), "codec: 'labels' travels by none"),
        (
            (
                *PACED,
                "--set",
                "activation_gradients=half",
                "--codec",
                "activation_gradients=dynamic8",
            ),
            "codec: activation_gradients",
        ),
        ((*PACED, "--set", "staleness_decay=1"), "staleness_decay: PacedSGD has no learning rate"),
        ((*PACED, "--bind", "tcp://0.0.0.0:5555"), "bind: 0.0.0.0 is every interface"),
        (
            (*PACED, "--strategy", "host", "--bind", "tcp://a:1"),
            "bind: goes not with strategy",
        ),
        (
            (*PACED, "--strategy", "tree", "--codec", "activation_gradients=half"),
            "codec: goes not with strategy tree",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_one_line(line, arguments: tuple[str, ...], message: str):
    line(*REHEARSE, *arguments)
    assert (line.code, line.out) == (2, ""), line.err
    (said,) = [text for text in line.err.splitlines() if text.startswith("paceline: ")]
    assert message in said
