"""Studies: profile a step, measure scaling, probe a machine."""
