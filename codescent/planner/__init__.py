"""In: a config, its plan, what it costs. Out: other plans that need less memory, or that compute for a larger share.
Does not price a plan (cost does) and does not print."""
