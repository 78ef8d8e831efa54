"""Numbers of 8 bits: formats, scaled tensors, layers, optimizers and their exchange of gradients.

Precisions and strategies are made of these; nothing here knows a plan or a configuration.
"""
