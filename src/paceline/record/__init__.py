"""Record tasks of training as timed spans, merge the spans of all ranks, and write traces."""
