"""Size limits in bytes of the files that Paceline reads, by kind of file.

The table in docs/security.md lists them. In memory, a parsed text file may take ten times its size.
"""

_MIB = 2**20
MACHINE = 4 * _MIB  # 512 devices with their links and codecs take 0.5 MiB
CONFIGURATION = _MIB
RESULT = 64 * _MIB  # 100,000 epochs take 20 MiB
TRACE = 256 * _MIB  # enough for a million spans
JOURNAL = 64 * _MIB
JOURNAL_HEADER = _MIB
MANIFEST = _MIB
CHECKPOINT_VALUES = 256 * _MIB  # enough for the order of millions of samples

UNPACKED_AT_LEAST = 4 * _MIB  # unpacked size that even the smallest packed file may have
DENSE_AT_LEAST = 64 * _MIB  # dense size that even the smallest sparse (LIBSVM) data set may have
MOST_UNPACKED = 200  # largest ratio of unpacked to packed size; repetitive text reaches 100
MOST_DENSE = 2000  # largest ratio of dense bytes to sparse bytes; data set news20 reaches 770
PIXELS = 2**26  # largest image in pixels; scaling an image down takes 3 or 4 bytes per pixel
