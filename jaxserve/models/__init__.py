"""Model families: weights, structure and one forward function for the whole-sequence pass and the cached pass.

Pure: given (graphdef, params, tokens, cache) the modules return new values. No thread, clock, queue or text.
"""
