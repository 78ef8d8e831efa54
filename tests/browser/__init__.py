"""What a person sees: notebooks in JupyterLab and Notebook 7, in Chromium."""
