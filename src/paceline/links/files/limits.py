"""Size limits of the files we read, by kind, in bytes; docs/security.md has the table.

A parsed text may take ten times its size in memory.
"""

_MIB = 2**20
MACHINE = 4 * _MIB  # 512 devices with their links and codecs take 0.5 MiB
CONFIGURATION = _MIB
RESULT = 64 * _MIB  # 100,000 epochs take 20 MiB
TRACE = 256 * _MIB  # a million spans
JOURNAL = 64 * _MIB
JOURNAL_HEADER = _MIB
MANIFEST = _MIB
CHECKPOINT_VALUES = 256 * _MIB  # includes the order of millions of samples

UNPACKED_AT_LEAST = 4 * _MIB  # however small the file
DENSE_AT_LEAST = 64 * _MIB  # however short the text
MOST_UNPACKED = 200  # times a packed file's bytes; repetitive text reaches 100
MOST_DENSE = 2000  # times the bytes of a sparse text, as dense values; news20 reaches 770
PIXELS = 2**26  # of an image; each takes 3 or 4 bytes while the image is scaled down
