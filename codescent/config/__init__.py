"""In: a TOML file and command-line overrides. Out: the config as frozen, typed objects; a description of each key.
Does not import torch and does not check values that depend on ranks or presets (build does)."""
