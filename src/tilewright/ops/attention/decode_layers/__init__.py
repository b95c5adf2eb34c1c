"""`decode_layers`: all layers of a decoder for one token per sequence."""
