"""In: activations and a layer's parameters. Out: what a layer computes, some with a backward pass of their own.
Does not know a model, a rank or a strategy."""
