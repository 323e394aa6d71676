"""The largest files that are read, by kind, in bytes; docs/security.md has the table.

What a reader makes of a text takes up to ten times its bytes of memory.
"""

_MIB = 2**20
MACHINE = 4 * _MIB  # a file of 512 devices, each with its links and codecs, has 0.5 MiB
CONFIGURATION = _MIB
RESULT = 64 * _MIB  # of a run of 100,000 epochs 20 MiB
TRACE = 256 * _MIB  # a million spans
JOURNAL = 64 * _MIB
JOURNAL_HEADER = _MIB
MANIFEST = _MIB
CHECKPOINT_VALUES = 256 * _MIB  # order and progress of what has trained on millions of samples

UNPACKED_AT_LEAST = 4 * _MIB  # however small the file
DENSE_AT_LEAST = 64 * _MIB  # however short the text
MOST_UNPACKED = 200  # times a packed file's bytes: text of few different words has 100
MOST_DENSE = 2000  # times the bytes of a sparse text, as dense values: news20 has 770
PIXELS = 2**26  # of an image, each of which takes 3 or 4 bytes while it is made smaller
