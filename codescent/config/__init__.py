"""In: a TOML file and the words of a command line. Out: the run as typed, frozen sections; the meaning of each key.
Does not import torch and does not check what depends on ranks or presets (build does)."""
