"""In: text files, which become token shards on disk. Out: samples, which are read from token shards.
Does not know tasks, or how a run divides its work over ranks."""
