"""A clock that stands in for the time module: who sleeps moves it."""

from ticking import Ticking


class Sleeping(Ticking):
    """Each sleep takes `late_s` longer than asked for."""

    def __init__(self, late_s: float = 0.0) -> None:
        super().__init__()
        self.late_s = late_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late_s
