"""In: a TOML file and the words of a command line. Out: the run as typed, frozen sections, and what each key means.
Does not import torch; what depends on ranks or presets is for build."""
