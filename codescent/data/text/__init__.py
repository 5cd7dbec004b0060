"""In: text files, or token shards. Out: token shards, and samples of their tokens.
Does not know tasks or layouts."""
