"""In: activations and a layer's parameters. Out: the layer's output. Some layers have a hand-written backward pass.
Does not know a model, a rank or a strategy."""
