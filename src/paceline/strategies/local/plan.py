from typing import Any
from paceline.core.plan import Plan


def plan(workload: Any, machine: Any, config: Any, window: Any) -> Plan:
    raise NotImplementedError
