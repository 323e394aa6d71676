"""Put the tables of result.json into README.md, between the lines that say so.

python benchmarks/scaling_tables/tables.py
"""

import main

from readme import fill

if __name__ == "__main__":
    fill(main.HERE, ("result.json",), main.text)
