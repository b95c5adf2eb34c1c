"""One token per sequence of Kimi Delta Attention, from the layer's input to what its output projection reads."""
