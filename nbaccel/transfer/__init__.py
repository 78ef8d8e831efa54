"""What travels between notebook and workers.

Models, weights, functions, names of the notebook.
"""
