"""In: the text of a config.json. Out: any language model of `transformers` as a kind: sizes, parameters, module.
Does not know an architecture: what its blocks are and do is observed, without memory."""
