"""Records that are read and written: settings, results, machine files."""
