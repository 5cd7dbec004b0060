"""A trained model as an engine: requests are added and leave at any step, and each step gives new tokens.

`open_engine` opens a run, a checkpoint of it or a Hugging Face folder; `Engine` serves a module that is in memory.
"""
