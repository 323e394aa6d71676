"""Studies of many runs or of a machine: profile, scale, probe."""
