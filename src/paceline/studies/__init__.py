"""Studies: profile training steps, measure scaling, describe a machine."""
