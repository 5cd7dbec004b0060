"""In: cluster files. Out: what the machines of a run are: devices, nodes, links, prices, software.
Does not measure a machine (verbs/measure.py does) and does not price a plan (cost/price.py does)."""
